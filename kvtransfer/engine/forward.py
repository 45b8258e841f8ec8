"""One prefill forward: the stages, the computation and the pushes of a batch of chunks.

Prepared and taken apart by the engine's loop; :meth:`ForwardPass.run` is the part that blocks on
layers and runs in the compute thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.engine.base import describe_logits
from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.messages import Admit, Assign, LogitsInfo
from kvtransfer.engine.sequences import StreamedSequence
from kvtransfer.errors import KVTransferError
from kvtransfer.memory import BufferPool
from kvtransfer.models import Arena, ArenaSpan, BatchRunner, SequenceSlice
from kvtransfer.scheduler import BatchItem, Progress
from kvtransfer.stream import LayerStream
from kvtransfer.transport import Ticket, TrafficManager

__all__ = ["NO_PEER", "NO_SLOTS", "Chunk", "ForwardPass", "PrefillRequest", "Transfers"]

NO_SLOTS = np.empty(0, np.uint32)
NO_PEER = 2**32 - 1
SHORTEST_SPAN_NS = 50_000


@dataclass
class PrefillRequest:
    """A request on the prefill side. Of its ``hit_blocks`` the DE loads the first ``decode_blocks``
    (``remote`` tells which of their layers can be read there), we load the others into ``slots``
    (``source`` tells of their layers). ``computed`` tokens have their KV in the hit blocks or the DE
    buffer. ``kept``: blocks [first, end) that an earlier attempt loaded; the last of ``slots`` hold
    them."""

    assign: Assign
    tokens: npt.NDArray[np.uint32]
    admit: Admit | None = None
    begun: bool = False
    doomed: bool = (
        False  # its DE or its assignment is gone: drop it as soon as nothing is in flight
    )
    hit_blocks: int = 0
    decode_blocks: int = 0
    slots: npt.NDArray[np.uint32] = field(default_factory=lambda: NO_SLOTS)
    load: Ticket | None = None
    source: LayerStream | None = None
    remote: LayerStream | None = None
    receive_tag: int | None = None
    progress: dict[Literal["pe", "de"], Progress] | None = None  # of a split's sides
    kept: tuple[int, int] | None = None
    kept_bytes: int = 0
    kept_s: float = 0.0
    computed: int = 0
    chunks: int = 0
    stall_s: npt.NDArray[np.float64] | None = None
    compute_s: npt.NDArray[np.float64] | None = None
    begin_ns: int = 0  # of the attempt's load, or of its admission without one
    first_begin_ns: int = 0
    device_tokens: int = 0

    @property
    def request_id(self) -> int:
        return self.assign.request_id


@dataclass(frozen=True)
class Transfers:
    """Where a forward's bytes come from and go to."""

    config: ClusterConfig
    traffic: TrafficManager
    pool: BufferPool
    arena: Arena


class Chunk:
    """One request's part of a forward: its span on the device, its streams and its transfers."""

    def __init__(
        self, parts: Transfers, request: PrefillRequest, item: BatchItem, span: ArenaSpan, peer: int
    ) -> None:
        assert request.admit is not None
        self.request, self.item, self.span = request, item, span
        self._parts, self._admit, self._peer = parts, request.admit, peer
        self._hit_tokens = request.hit_blocks * parts.config.block_tokens
        self._decode_tokens = request.decode_blocks * parts.config.block_tokens
        # Tokens behind the hit prefix that earlier chunks computed: they are in the DE buffer.
        self._earlier = item.cached - self._hit_tokens
        sources = (request.decode_blocks > 0) + (len(request.slots) > 0) + (self._earlier > 0)
        self.sequence = StreamedSequence(
            parts.arena,
            span,
            ready=parts.traffic.make_stream(sources),
            computed=parts.traffic.make_stream(1),
            released=parts.traffic.make_stream(2),
            deadline=time.monotonic() + parts.config.deadline_s,
        )
        self.tickets: list[Ticket] = []
        self._stage()
        self._push()

    @property
    def slice(self) -> SequenceSlice:
        cached, new = self.item.cached, self.item.new
        return SequenceSlice(self.sequence, cached, self.request.tokens[cached : cached + new])

    def _common(self) -> dict[str, Any]:
        return {
            "cache": self._parts.arena.cache,
            "pages": self.span.pages,
            "timeout_s": self._parts.config.deadline_s,
            "trace_id": self.request.request_id,
        }

    def _stage(self) -> None:
        traffic, request = self._parts.traffic, self.request
        remote = np.frombuffer(self._admit.block_starts, "<u8")
        stage: dict[str, Any] = {
            **self._common(),
            "into": self.sequence.ready,
            "gate": self.sequence.released,
        }
        if self._decode_tokens:  # straight from the DE buffer to the device
            self.tickets.append(
                traffic.stage_from_peer(
                    **stage,
                    block_starts=remote,
                    first_token=0,
                    num_tokens=self._decode_tokens,
                    after=request.remote,
                    peer=self._peer,
                )
            )
        if len(request.slots):  # from our own buffer
            # Slot i of the plan holds block i, so the DE's blocks' starts are never read.
            starts = np.zeros(request.hit_blocks, np.uint64)
            starts[request.decode_blocks :] = self._parts.pool.payload_offsets(request.slots)
            self.tickets.append(
                traffic.stage(
                    **stage,
                    block_starts=starts,
                    slots=request.slots,
                    first_token=self._decode_tokens,
                    num_tokens=self._hit_tokens - self._decode_tokens,
                    after=request.source,
                )
            )
        if self._earlier:
            self.tickets.append(
                traffic.stage_from_peer(
                    **stage,
                    block_starts=remote,
                    first_token=self._hit_tokens,
                    num_tokens=self._earlier,
                    peer=self._peer,
                )
            )

    def _push(self) -> None:
        # The DE gets the hit tokens that we loaded with the first chunk; its own it has already.
        send_hits = self.request.chunks == 0 and len(self.request.slots) > 0
        first = self._decode_tokens if send_hits else self.item.cached
        self.tickets.append(
            self._parts.traffic.push(
                **self._common(),
                block_starts=np.frombuffer(self._admit.block_starts, "<u8"),
                first_token=first,
                num_tokens=self.item.cached + self.item.new - first,
                after=self.sequence.computed,
                into=self.sequence.released,
                peer=self._peer,
                tag=self._admit.tag,
            )
        )

    def drain(self, *, cancel: bool) -> None:
        """Returns when no transfer of this chunk can touch the device any more."""
        for ticket in self.tickets:
            if cancel:
                ticket.cancel()
            ticket.wait(self._parts.config.deadline_s + 1.0)
            if not cancel:
                ticket.check()


class ForwardPass:
    """A batch in flight. After run(): either ``error``, or ``infos`` and ``next_tokens``."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self.chunks = chunks
        self.error: KVTransferError | None = None
        self.infos: list[LogitsInfo] = []
        self.next_tokens: list[int] = []
        self.begin_ns = self.end_ns = 0

    def run(self, runner: BatchRunner, journal: bool) -> None:
        """Computes layer by layer, waiting for each to arrive. In the compute thread."""
        self.begin_ns = time.monotonic_ns()
        try:
            logits: torch.Tensor = runner.forward([chunk.slice for chunk in self.chunks])
            self.end_ns = time.monotonic_ns()
            for chunk in self.chunks:
                chunk.drain(cancel=False)
        except KVTransferError as error:
            self.error = error
            for chunk in self.chunks:
                chunk.drain(cancel=True)
            return
        self.infos = [describe_logits(row, journal) for row in logits]
        self.next_tokens = logits.argmax(dim=-1).tolist()

    def layer_times(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(begin, end) ns of each layer's waiting, over all chunks, and of its computation."""
        first, last = self.chunks[0].sequence.waits, self.chunks[-1].sequence.waits
        waits = [(begin, end) for (begin, _), (_, end) in zip(first, last, strict=True)]
        ends = [begin for begin, _ in waits[1:]] + [self.end_ns]
        return waits, [(end, until) for (_, end), until in zip(waits, ends, strict=True)]

    def account(self) -> None:
        """Adds this forward's times to its requests."""
        waits, computes = self.layer_times()
        stall = np.array([end - begin for begin, end in waits]) * 1e-9
        compute = np.array([end - begin for begin, end in computes]) * 1e-9
        for chunk in self.chunks:
            request, item = chunk.request, chunk.item
            request.stall_s = stall if request.stall_s is None else request.stall_s + stall
            request.compute_s = (
                compute if request.compute_s is None else request.compute_s + compute
            )
            request.device_tokens = max(request.device_tokens, item.cached + item.new)

    def spans(self) -> list[tuple[str, int, int, int]]:
        """For the timeline: (name, request, begin ns, end ns)."""
        waits, computes = self.layer_times()
        request = self.chunks[0].request.request_id
        out = [(f"layer {i}", request, *span) for i, span in enumerate(computes)]
        for layer, (begin, end) in enumerate(waits):
            if end - begin > SHORTEST_SPAN_NS:
                out.append((f"stall {layer}", request, begin, end))
        return out

    def journal_entry(self) -> tuple[int, list[tuple[int, int, int, str]]]:
        items = [
            (chunk.request.request_id, chunk.item.cached, chunk.item.new, info.digest)
            for chunk, info in zip(self.chunks, self.infos, strict=True)
        ]
        return self.begin_ns, items
