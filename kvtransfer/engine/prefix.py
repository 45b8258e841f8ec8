"""The prefill engine's part of a prefix: its load, and whether a side of a split is slow."""

from __future__ import annotations

import time
from typing import Literal

import numpy as np

from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.forward import NO_SLOTS, PrefillRequest
from kvtransfer.engine.messages import Admit
from kvtransfer.keys import chain_keys
from kvtransfer.memory import BufferPool
from kvtransfer.scheduler import Progress, takes_over
from kvtransfer.store import BlockStore
from kvtransfer.stream import LayerStream
from kvtransfer.transport import TrafficManager

__all__ = ["PrefixLoader", "layers_ready"]


def layers_ready(stream: LayerStream) -> int:
    """How many layers from the first on have arrived."""
    layers = stream.num_layers
    return next((i for i in range(layers) if not stream.ready(i)), layers)


class PrefixLoader:
    """Begins and ends the loads of requests on the prefill side."""

    def __init__(
        self,
        config: ClusterConfig,
        traffic: TrafficManager,
        store: BlockStore,
        pool: BufferPool,
        parts: int,
    ) -> None:
        self._config, self._traffic = config, traffic
        self._store, self._pool, self._parts = store, pool, parts

    def begin(self, request: PrefillRequest, admit: Admit) -> bool:
        """Loads what follows of the prefix behind the DE's head. False: the PE buffer is full; tried
        again when a request has given its slots back."""
        first = request.decode_blocks
        root = self._config.root_key
        keys = chain_keys(root, request.tokens[:-1], self._config.block_tokens)
        keys = keys[: admit.max_hit_blocks]
        if request.kept is not None and not first < request.kept[0] < request.kept[1] <= len(keys):
            self._forget_kept(request)
        if request.kept is not None:
            end, hit = request.kept
        else:
            # What is longer than the whole pool is loaded as far as it fits; the rest is recomputed.
            hit = min(self._store.lookup(keys, root), first + self._pool.num_slots)
            end = hit
        if end <= first:
            return True
        slots = self._pool.acquire(end - first)
        if slots is None:
            self._forget_kept(request)  # two that wait with slots in hand would wait for each other
            return False
        request.slots = np.concatenate([slots, request.slots])
        request.source = self._traffic.make_stream(end - first)
        request.load = self._traffic.load(
            keys=keys[first:end],
            parent=keys[first - 1].tobytes() if first else root,
            slots=slots,
            parts=self._parts,
            into=request.source,
            timeout_s=self._config.deadline_s,
            trace_id=request.request_id,
        )
        request.hit_blocks = hit
        return True

    def end(self, request: PrefillRequest, *, keep: bool = False) -> None:
        """Gives everything back, or keeps the blocks that were loaded for the next attempt. Slots that
        a read may still write stay out of the pool until it is over."""
        load = request.load
        if keep and load is not None and load.wait(self._config.deadline_s) and load.error is None:
            request.kept = (request.decode_blocks, request.hit_blocks)
            request.kept_bytes += load.num_bytes
            request.kept_s += load.seconds
        else:
            if load is not None:
                load.cancel()
            self._forget_kept(request)
        request.load = request.source = None

    def _forget_kept(self, request: PrefillRequest) -> None:
        if len(request.slots):
            self._pool.release(request.slots)
        request.slots = NO_SLOTS
        request.kept = None
        request.kept_bytes, request.kept_s = 0, 0.0

    def slow_side(self, request: PrefillRequest) -> Literal["pe", "de"] | None:
        """Of a split: the side that is so far behind that the other, which is through, should read its
        part as well (docs/decisions/0011)."""
        own, remote = request.source, request.remote
        if own is None or remote is None or own.failed or remote.failed:
            return None
        elapsed_s = (time.monotonic_ns() - request.begin_ns) * 1e-9
        if request.progress is None:
            layers, block = own.num_layers, self._config.block_tokens
            request.progress = {
                "pe": Progress(layers, (request.hit_blocks - request.decode_blocks) * block),
                "de": Progress(layers, request.decode_blocks * block),
            }
        pe, de = request.progress["pe"], request.progress["de"]
        pe.see(layers_ready(own), elapsed_s)
        de.see(layers_ready(remote), elapsed_s)
        if takes_over(de, pe):
            return "pe"
        return "de" if takes_over(pe, de) else None
