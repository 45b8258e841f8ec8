"""A decode engine's requests and how their blocks reach the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.messages import Assign, LogitsInfo, PrefillDone, Restart
from kvtransfer.keys import chain_keys
from kvtransfer.memory import BufferPool
from kvtransfer.models import Arena, ArenaSpan
from kvtransfer.stream import LayerStream
from kvtransfer.transport import Ticket, TrafficManager

__all__ = ["NO_SLOTS", "DecodeRequest", "Persister", "Side"]

NO_SLOTS = np.empty(0, np.uint32)
Side = Literal["pe", "de"]


@dataclass
class DecodeRequest:
    """What a decode engine knows of one request, from its assignment to its last token."""

    assign: Assign
    tokens: list[int]  # the prompt, then what was generated
    prompt_tokens: int
    keys: npt.NDArray[np.uint8]
    slots: npt.NDArray[np.uint32] = field(default_factory=lambda: NO_SLOTS)
    span: ArenaSpan | None = None
    attempt: int = 0
    max_hit_blocks: int = 0
    unwell: Side | None = None  # the side whose storage failed first
    hit_blocks: int = 0  # the head of the prefix, which this side loads
    good_blocks: int = 0  # of them, what an earlier attempt left in the slots
    load: Ticket | None = None
    source: LayerStream | None = None
    serve: Ticket | None = None
    receive: LayerStream | None = None
    tag: int | None = None
    restart: Restart | None = None  # asked for; it waits for the load under way
    admitted_at: float = 0.0
    prefill_done: PrefillDone | None = None
    decoding: bool = False
    decode_begin_ns: int = 0
    logits: list[LogitsInfo] = field(default_factory=list)
    persisted: int = 0  # blocks handed to the store or found there
    persists: list[tuple[int, Ticket]] = field(default_factory=list)  # (first block, ticket)
    failures: list[str] = field(default_factory=list)
    load_s: float = 0.0
    load_end_ns: int = 0
    loaded_bytes: int = 0

    @property
    def request_id(self) -> int:
        return self.assign.request_id

    @property
    def readers(self) -> set[Side]:
        """Who loads the prefix in this attempt: as assigned, or who is left of the two."""
        both: set[Side] = {"pe", "de"}
        path = self.assign.read_path
        wanted = both if path == "split" else both & {path}
        unwell = {self.unwell}
        return (wanted - unwell) or (both - unwell)

    @property
    def wanted_tokens(self) -> int:
        return self.prompt_tokens + self.assign.num_generate

    @property
    def complete(self) -> bool:
        return self.decoding and len(self.tokens) >= self.wanted_tokens

    @property
    def fresh_blocks(self) -> list[bool]:
        """Per persisted block, whether it was new to the store."""
        fresh = [False] * self.persisted
        for first, ticket in self.persists:
            for i, new in enumerate(ticket.fresh):
                fresh[first + i] = new
        return fresh


class Persister:
    """Hands full token blocks to the store: the prompt's from the DE buffer, later ones from the
    device as they fill. A block is handed over once."""

    def __init__(
        self, config: ClusterConfig, traffic: TrafficManager, pool: BufferPool, arena: Arena
    ) -> None:
        self.config = config
        self.layout = config.layout
        self.root_key = config.root_key
        self.traffic = traffic
        self.pool = pool
        self.arena = arena

    def hand_over(self, request: DecodeRequest, end: int, slots: npt.NDArray[np.uint32]) -> None:
        """Hands blocks [persisted, end) to the store; the operation keeps their slots."""
        first = request.persisted
        parent = self.root_key if first == 0 else request.keys[first - 1].tobytes()
        ticket = self.traffic.persist(
            keys=request.keys[first:end],
            parent=parent,
            slots=slots,
            trace_id=request.request_id,
        )
        request.persists.append((first, ticket))
        request.persisted = end

    def generated(self, request: DecodeRequest) -> None:
        """Persists the blocks whose KV is complete on the device (all tokens but the last)."""
        full = (len(request.tokens) - 1) // self.config.block_tokens
        while request.persisted < full:
            slots = self.pool.acquire(1)
            if slots is None:
                return  # tried again after the next token and before the request finishes
            first = request.persisted
            if len(request.keys) <= first:
                self._extend_keys(request)
            assert request.span is not None
            # Slot i of the plan holds block i, so the other blocks' starts are never read.
            starts = np.zeros(first + 1, np.uint64)
            starts[first] = self.pool.payload_offsets(slots)[0]
            self.arena.cache.gather(
                self.layout,
                self.arena.region,
                self.pool.region,
                request.span.pages,
                starts,
                first * self.config.block_tokens,
                self.config.block_tokens,
            )
            self.hand_over(request, first + 1, slots)
            self.pool.release(slots)

    def _extend_keys(self, request: DecodeRequest) -> None:
        known = len(request.keys)
        parent = request.keys[-1].tobytes() if known else self.root_key
        more = chain_keys(
            parent,
            np.array(request.tokens[:-1], np.uint32),
            self.config.block_tokens,
            start=known * self.config.block_tokens,
        )
        request.keys = np.concatenate([request.keys, more])

    def done(self, request: DecodeRequest) -> bool:
        self.generated(request)
        full = (len(request.tokens) - 1) // self.config.block_tokens
        return request.persisted >= full and all(t.done for _, t in request.persists)
