"""The decode engine: admit (reserve the DE buffer), receive, decode with continuous batching, persist.

On the DE read path it also loads the hit prefix into the DE buffer and serves it to the PE.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import zmq

from kvtransfer.engine.base import Engine, describe_logits, send
from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.messages import (
    Admit,
    Assign,
    EngineLost,
    Finished,
    GaveUp,
    LogitsInfo,
    Message,
    PeerHello,
    PrefillDone,
    Pull,
    Report,
    Restart,
    pack_tokens,
    unpack_tokens,
)
from kvtransfer.engine.sequences import ResidentSequence
from kvtransfer.keys import chain_keys
from kvtransfer.models import ArenaSpan, SequenceSlice
from kvtransfer.stream import LayerStream
from kvtransfer.transport import Ticket

__all__ = ["DecodeEngine"]

NO_SLOTS = np.empty(0, np.uint32)


@dataclass
class _Request:
    assign: Assign
    tokens: list[int]  # the prompt, then what was generated
    prompt_tokens: int
    keys: npt.NDArray[np.uint8]
    slots: npt.NDArray[np.uint32] = field(default_factory=lambda: NO_SLOTS)
    span: ArenaSpan | None = None
    attempt: int = 0
    max_hit_blocks: int = 0
    hit_blocks: int = 0
    load: Ticket | None = None
    source: LayerStream | None = None
    serve: Ticket | None = None
    receive: LayerStream | None = None
    tag: int | None = None
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
    def wanted_tokens(self) -> int:
        return self.prompt_tokens + self.assign.num_generate

    @property
    def complete(self) -> bool:
        return self.decoding and len(self.tokens) >= self.wanted_tokens


class DecodeEngine(Engine):
    kind = "decode"

    def __init__(self, config: ClusterConfig, name: str) -> None:
        super().__init__(config, name, 0, config.decode_tokens)
        self._control = self._context.socket(zmq.ROUTER)
        self._control.setsockopt(zmq.LINGER, 0)
        self._control.bind(config.control_address(name))
        self.poller.register(self._control, zmq.POLLIN)
        self._requests: dict[int, _Request] = {}
        self._waiting: deque[int] = deque()  # not admitted yet
        # A ROUTER drops what it sends to a peer that hasn't connected yet.
        self._connected: set[str] = set()
        self._unsent: dict[str, list[Admit]] = {}

    # ------------------------------------------------------------------ messages

    def handle(self, message: Message, sender: str) -> None:
        if isinstance(message, Assign):
            self._on_assign(message)
        elif isinstance(message, Pull):
            self._on_pull(message, sender)
        elif isinstance(message, PrefillDone):
            request = self._current(message.request_id, message.life, message.attempt)
            if request is not None and request.receive is not None:
                request.prefill_done = message
                request.receive.set_expected(message.arrivals)
        elif isinstance(message, Restart):
            self._on_restart(message)
        elif isinstance(message, GaveUp):
            request = self._requests.get(message.request_id)
            if request is not None and request.assign.life == message.life:
                self._fail(request, message.reason)
        elif isinstance(message, EngineLost):
            self._on_lost(message)
        elif isinstance(message, PeerHello):
            for admit in self._unsent.pop(message.engine, []):
                send(self._control, admit, to=message.engine)
            self._connected.add(message.engine)

    def _current(self, request_id: int, life: int, attempt: int) -> _Request | None:
        request = self._requests.get(request_id)
        if request is None or request.assign.life != life or request.attempt != attempt:
            return None  # of an earlier life or attempt
        return request

    def _on_assign(self, message: Assign) -> None:
        known = self._requests.get(message.request_id)
        if known is not None:
            if known.assign.life >= message.life:
                return
            self._drop(known)
        tokens = unpack_tokens(message.tokens)
        keys = chain_keys(self.root_key, tokens, self.config.block_tokens)
        request = _Request(message, tokens.tolist(), len(tokens), keys)
        request.max_hit_blocks = (len(tokens) - 1) // self.config.block_tokens
        self._requests[message.request_id] = request
        self._waiting.append(message.request_id)

    def _on_pull(self, message: Pull, sender: str) -> None:
        request = self._current(message.request_id, message.life, message.attempt)
        if request is None or request.source is None:
            return
        request.serve = self.traffic.serve(
            after=request.source,
            peer=self.traffic.wait_peer(sender, 5.0),
            tag=message.tag,
            slots=request.slots[: request.hit_blocks],
            timeout_s=self.config.deadline_s,
        )

    def _on_restart(self, message: Restart) -> None:
        request = self._current(message.request_id, message.life, message.attempt)
        if request is None:
            return
        most = min(request.max_hit_blocks, message.max_hit_blocks)
        self._drain_load(request)
        if request.load is not None and request.load.error is not None:
            most = min(most, request.load.blocks)
            request.failures.append(request.load.error[1])
        else:
            request.failures.append(message.reason)
        self._close_receive(request)
        request.max_hit_blocks = most
        request.attempt += 1
        self._offer(request)

    def _on_lost(self, message: EngineLost) -> None:
        self._connected.discard(message.engine)
        self._unsent.pop(message.engine, None)
        for request in list(self._requests.values()):
            if request.assign.prefill == message.engine and not request.decoding:
                self._drop(request)

    def make_report(self) -> Report:
        requests = list(self._requests.values())
        waiting = sum(self._requests[i].wanted_tokens for i in self._waiting)
        return Report(
            engine=self.name,
            unfinished_requests=len(requests),
            unfinished_tokens=sum(len(r.tokens) for r in requests),
            read_queue_tokens=self.traffic.read_queue_tokens,
            free_tokens=max(self.arena.free_tokens - waiting, 0),
            seen=[r.request_id for r in requests],
        )

    # ------------------------------------------------------------------ a request's life

    def work(self) -> bool:
        while self._waiting and self._admit(self._requests[self._waiting[0]]):
            pass
        for request in list(self._requests.values()):
            if not request.decoding and self._arrived(request):
                self._land(request)
        active = [r for r in self._requests.values() if r.decoding and not r.complete]
        if active:
            self._step(active)
        for request in list(self._requests.values()):
            if request.complete and self._persisted(request):
                self._finish(request)
        self._check_deadlines()
        return bool(active)

    def _admit(self, request: _Request) -> bool:
        """Reserves buffer and device memory for the head of the line, all or nothing. False: it has
        to wait until others finish."""
        blocks = -(-request.prompt_tokens // self.config.block_tokens)
        if blocks > self.pool.num_slots or request.wanted_tokens > self.arena.num_tokens:
            self._fail(
                request,
                f"{request.prompt_tokens} + {request.assign.num_generate} tokens need {blocks} "
                f"blocks of DE buffer and {request.wanted_tokens} tokens of device memory; "
                f"{self.name} has {self.pool.num_slots} and {self.arena.num_tokens}",
            )
            return True
        span = self.arena.allocate(request.wanted_tokens)
        if span is None:
            return False
        slots = self.pool.acquire(blocks)
        if slots is None:
            self.arena.free(span)
            return False
        request.span, request.slots = span, slots
        self._waiting.popleft()
        self._offer(request)
        return True

    def _offer(self, request: _Request) -> None:
        """Starts an attempt: opens the receive, begins the load (DE path), tells the PE."""
        request.prefill_done = None
        request.admitted_at = time.monotonic()
        request.receive = self.traffic.make_stream(LayerStream.UNKNOWN)
        request.tag = self.traffic.open_receive(request.receive)
        request.hit_blocks = 0
        if request.assign.read_path == "de":
            self._begin_load(request)
        starts = self.pool.payload_offsets(request.slots)
        message = Admit(
            request_id=request.request_id,
            life=request.assign.life,
            attempt=request.attempt,
            hit_blocks=request.hit_blocks,
            max_hit_blocks=request.max_hit_blocks,
            block_starts=starts.astype("<u8").tobytes(),
            tag=request.tag,
        )
        engine = request.assign.prefill
        if engine in self._connected:
            send(self._control, message, to=engine)
        else:
            self._unsent.setdefault(engine, []).append(message)

    def _begin_load(self, request: _Request) -> None:
        keys = request.keys[: request.max_hit_blocks]
        request.hit_blocks = self.store.lookup(keys, self.root_key)
        request.load = request.source = request.serve = None
        if request.hit_blocks == 0:
            return
        request.source = self.traffic.make_stream(request.hit_blocks)
        request.load = self.traffic.load(
            keys=keys[: request.hit_blocks],
            parent=self.root_key,
            slots=request.slots[: request.hit_blocks],
            parts=self.parts,
            into=request.source,
            timeout_s=self.config.deadline_s,
            trace_id=request.request_id,
        )

    def _arrived(self, request: _Request) -> bool:
        stream = request.receive
        if request.prefill_done is None or stream is None:
            return False
        return all(stream.ready(layer) for layer in range(stream.num_layers))

    def _land(self, request: _Request) -> None:
        """DE buffer -> device, full blocks -> store, and the buffer is given back."""
        done = request.prefill_done
        assert done is not None
        assert request.span is not None
        self.arena.cache.scatter(
            self.layout,
            self.arena.region,
            self.pool.region,
            request.span.pages,
            self.pool.payload_offsets(request.slots),
            0,
            request.prompt_tokens,
        )
        if request.load is not None:
            request.load.wait(self.config.deadline_s)
            request.load_s += request.load.seconds
            request.load_end_ns = request.load.end_ns
            request.loaded_bytes += request.load.num_bytes
        full = request.prompt_tokens // self.config.block_tokens
        request.persisted = done.stats.hit_blocks
        if full > request.persisted:
            self._persist(request, full, request.slots[request.persisted : full])
        self._release_buffer(request)
        request.decoding = True
        request.decode_begin_ns = time.monotonic_ns()
        request.logits.append(done.logits)
        request.tokens.append(done.first_token)

    def _persist(self, request: _Request, end: int, slots: npt.NDArray[np.uint32]) -> None:
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

    def _step(self, active: list[_Request]) -> None:
        """One token for every active sequence."""
        begin_ns = time.monotonic_ns()
        slices = []
        for request in active:
            assert request.span is not None
            last = len(request.tokens) - 1
            sequence = ResidentSequence(self.arena, request.span)
            slices.append(SequenceSlice(sequence, last, np.array(request.tokens[last:], np.uint32)))
        logits = self.runner.forward(slices)
        infos = [describe_logits(row, self.config.journal) for row in logits]
        if self.config.journal:
            items = [
                (r.request_id, piece.first, 1, info.digest)
                for r, piece, info in zip(active, slices, infos, strict=True)
            ]
            self.forwards.append((begin_ns, items))
        if self.config.trace:
            self.spans.append(("decode", active[0].request_id, begin_ns, time.monotonic_ns()))
        for request, info, token in zip(active, infos, logits.argmax(dim=-1).tolist(), strict=True):
            request.logits.append(info)
            request.tokens.append(int(token))
            self._persist_generated(request)

    def _persist_generated(self, request: _Request) -> None:
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
            self._persist(request, first + 1, slots)
            self.pool.release(slots)

    def _extend_keys(self, request: _Request) -> None:
        known = len(request.keys)
        parent = request.keys[-1].tobytes() if known else self.root_key
        more = chain_keys(
            parent,
            np.array(request.tokens[:-1], np.uint32),
            self.config.block_tokens,
            start=known * self.config.block_tokens,
        )
        request.keys = np.concatenate([request.keys, more])

    def _persisted(self, request: _Request) -> bool:
        self._persist_generated(request)
        full = (len(request.tokens) - 1) // self.config.block_tokens
        return request.persisted >= full and all(t.done for _, t in request.persists)

    def _finish(self, request: _Request) -> None:
        done = request.prefill_done
        assert done is not None
        fresh = [False] * request.persisted
        for first, ticket in request.persists:
            for i, new in enumerate(ticket.fresh):
                fresh[first + i] = new
        self.tell_scheduler(
            Finished(
                request_id=request.request_id,
                life=request.assign.life,
                tokens=pack_tokens(request.tokens[request.prompt_tokens :]),
                logits=request.logits,
                read_path=request.assign.read_path,
                prefill=request.assign.prefill,
                decode=self.name,
                load_s=request.load_s,
                load_end_ns=request.load_end_ns,
                loaded_bytes=request.loaded_bytes,
                attempts=request.attempt + 1,
                failures=request.failures,
                fresh_blocks=fresh,
                stats=done.stats,
                decode_begin_ns=request.decode_begin_ns,
                finished_ns=time.monotonic_ns(),
            )
        )
        self._drop(request)

    # ------------------------------------------------------------------ when things go wrong

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for request in list(self._requests.values()):
            waiting = request.receive is not None and not request.decoding
            # Every transfer has its own deadline; this one catches a PE that went silent.
            if waiting and now - request.admitted_at > 2 * self.config.deadline_s:
                self._fail(request, f"{request.assign.prefill} sent nothing within the deadline")

    def _fail(self, request: _Request, reason: str) -> None:
        self.tell_scheduler(
            Finished(
                request_id=request.request_id,
                life=request.assign.life,
                error=reason,
                failures=request.failures,
                attempts=request.attempt + 1,
            )
        )
        self._drop(request)

    def _drain_load(self, request: _Request) -> None:
        for ticket in (request.serve, request.load):
            if ticket is not None:
                ticket.cancel()
                ticket.wait(self.config.deadline_s + 1.0)

    def _close_receive(self, request: _Request) -> None:
        if request.tag is not None:
            self.traffic.close_receive(request.tag)
        request.tag = request.receive = None

    def _release_buffer(self, request: _Request) -> None:
        self._close_receive(request)
        if len(request.slots):
            self.pool.release(request.slots)
        request.slots = NO_SLOTS

    def _drop(self, request: _Request) -> None:
        """Forgets a request; nothing of it is in flight afterwards."""
        if not request.decoding:
            self._drain_load(request)
        self._release_buffer(request)
        if request.span is not None:
            self.arena.free(request.span)
            request.span = None
        self._requests.pop(request.request_id, None)
        if request.request_id in self._waiting:
            self._waiting.remove(request.request_id)
