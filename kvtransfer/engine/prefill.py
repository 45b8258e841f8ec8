"""The prefill engine: admit, load, compute layer by layer, publish.

A request's hit prefix comes from the PE buffer (PE read path) or is read from the DE buffer (DE read
path); later chunks of a chunked prefill read what earlier ones sent to the DE buffer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from kvtransfer.engine.base import Engine, describe_logits, send
from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.messages import (
    Admit,
    Assign,
    EngineLost,
    GaveUp,
    Message,
    PeerHello,
    PrefillDone,
    PrefillStats,
    Pull,
    Report,
    Restart,
    Started,
    unpack_tokens,
)
from kvtransfer.engine.sequences import StreamedSequence
from kvtransfer.errors import KVTransferError
from kvtransfer.keys import chain_keys
from kvtransfer.models import ArenaSpan, SequenceSlice
from kvtransfer.scheduler import BatchItem, PrefillWork, form_batch
from kvtransfer.stream import LayerStream
from kvtransfer.transport import Ticket

__all__ = ["LAYER_SLOTS", "PrefillEngine"]

log = logging.getLogger(__name__)
LAYER_SLOTS = 3  # one computing, one loading, one leaving
NO_SLOTS = np.empty(0, np.uint32)


@dataclass
class _Request:
    assign: Assign
    tokens: npt.NDArray[np.uint32]
    admit: Admit | None = None
    begun: bool = False
    hit_blocks: int = 0
    slots: npt.NDArray[np.uint32] = field(default_factory=lambda: NO_SLOTS)
    load: Ticket | None = None
    source: LayerStream | None = None  # readiness of the hit prefix, wherever it is read
    receive_tag: int | None = None
    computed: int = 0  # tokens whose KV is in the store's blocks or the DE buffer
    chunks: int = 0
    stall_s: npt.NDArray[np.float64] | None = None
    compute_s: npt.NDArray[np.float64] | None = None
    begin_ns: int = 0
    device_tokens: int = 0

    @property
    def request_id(self) -> int:
        return self.assign.request_id


@dataclass
class _Forward:
    """One request's part of a batch in flight."""

    request: _Request
    item: BatchItem
    span: ArenaSpan
    sequence: StreamedSequence
    tickets: list[Ticket] = field(default_factory=list)


class PrefillEngine(Engine):
    kind = "prefill"

    def __init__(self, config: ClusterConfig, name: str) -> None:
        super().__init__(config, name, LAYER_SLOTS, config.prefill_tokens)
        self._requests: dict[int, _Request] = {}
        self._order: deque[int] = deque()
        self._early_admits: dict[int, Admit] = {}
        self._peers: dict[str, int] = {}
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    # ------------------------------------------------------------------ messages

    def handle(self, message: Message, sender: str) -> None:
        if isinstance(message, Started):
            for engine in message.decode:
                self._connect(engine)
        elif isinstance(message, Assign):
            self._on_assign(message)
        elif isinstance(message, Admit):
            self._on_admit(message)
        elif isinstance(message, EngineLost):
            self.lost(message)

    def _connect(self, engine: str) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self.name.encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self.config.control_address(engine))
        self._sockets[engine] = socket
        self.poller.register(socket, zmq.POLLIN)
        self._peers[engine] = self.traffic.connect(self.config.listen_address(engine), 10.0)
        send(socket, PeerHello(engine=self.name))

    def _on_assign(self, message: Assign) -> None:
        known = self._requests.get(message.request_id)
        if known is not None:
            if known.assign.life >= message.life:
                return
            self._drop(known)
        request = _Request(message, unpack_tokens(message.tokens))
        self._requests[message.request_id] = request
        self._order.append(message.request_id)
        early = self._early_admits.pop(message.request_id, None)
        if early is not None:
            self._on_admit(early)

    def _on_admit(self, message: Admit) -> None:
        request = self._requests.get(message.request_id)
        if request is None or request.assign.life < message.life:
            self._early_admits[message.request_id] = message
        elif request.assign.life == message.life:
            self._reset(request)
            request.admit = message

    def lost(self, message: EngineLost) -> None:
        socket = self._sockets.pop(message.engine, None)
        self._peers.pop(message.engine, None)
        if socket is not None:
            self.poller.unregister(socket)
            socket.close()
        for request in list(self._requests.values()):
            if request.assign.decode == message.engine:
                self._drop(request)

    def make_report(self) -> Report:
        requests = list(self._requests.values())
        return Report(
            engine=self.name,
            unfinished_requests=len(requests),
            unfinished_tokens=sum(len(r.tokens) for r in requests),
            read_queue_tokens=self.traffic.read_queue_tokens,
            free_tokens=0,
            seen=[r.request_id for r in requests],
        )

    # ------------------------------------------------------------------ a request's life

    def work(self) -> bool:
        for request_id in list(self._order):
            request = self._requests[request_id]
            if request.admit is not None and not request.begun:
                self._begin(request)
        batch = self._form_batch()
        if batch:
            self._run(batch)
        return bool(batch)

    def _begin(self, request: _Request) -> None:
        """Starts the load of the hit prefix (PE path) or asks the DE to tell of its own."""
        admit = request.admit
        assert admit is not None
        if request.begin_ns == 0:
            request.begin_ns = time.monotonic_ns()
        if request.assign.read_path == "pe":
            if not self._begin_load(request, admit):
                return
        else:
            request.hit_blocks = admit.hit_blocks
            if request.hit_blocks:
                request.source = self.traffic.make_stream(1)
                request.receive_tag = self.traffic.open_receive(request.source)
                self._tell_decode(
                    request,
                    Pull(
                        request_id=request.request_id,
                        life=admit.life,
                        attempt=admit.attempt,
                        tag=request.receive_tag,
                    ),
                )
        request.computed = request.hit_blocks * self.config.block_tokens
        request.begun = True
        if not self._fits(request):
            self._give_up(
                request,
                f"{len(request.tokens)} tokens don't fit the prefill device memory of "
                f"{self.arena.num_tokens} tokens per layer",
            )

    def _begin_load(self, request: _Request, admit: Admit) -> bool:
        keys = chain_keys(self.root_key, request.tokens[:-1], self.config.block_tokens)
        keys = keys[: admit.max_hit_blocks]
        # A prefix longer than the whole pool is loaded as far as it fits; the rest is recomputed.
        hit = min(self.store.lookup(keys, self.root_key), self.pool.num_slots)
        if hit:
            slots = self.pool.acquire(hit)
            if slots is None:
                return False  # back-pressure: again when a request has given its slots back
            request.slots = slots
            request.source = self.traffic.make_stream(hit)
            request.load = self.traffic.load(
                keys=keys[:hit],
                parent=self.root_key,
                slots=slots,
                parts=self.parts,
                into=request.source,
                timeout_s=self.config.deadline_s,
                trace_id=request.request_id,
            )
        request.hit_blocks = hit
        return True

    def _fits(self, request: _Request) -> bool:
        return len(request.tokens) <= self.arena.num_tokens

    def _form_batch(self) -> list[_Forward]:
        """FIFO over the requests whose first layer is there (or whose load has failed)."""
        ready = []
        for request_id in self._order:
            request = self._requests[request_id]
            if not request.begun:
                continue
            source = request.source
            if source is not None and not source.failed and not self._startable(source):
                continue
            ready.append(request)
        work = [
            PrefillWork(r.request_id, r.computed, len(r.tokens) - r.computed) for r in ready
        ]
        items = form_batch(
            work, self.config.attention_time, self.config.quota_s, self.arena.num_tokens
        )
        forwards = []
        for item in items:
            span = self.arena.allocate(item.cached + item.new)
            if span is None:  # page rounding: goes into the next batch
                break
            forwards.append(self._prepare(self._requests[item.request_id], item, span))
        return forwards

    def _startable(self, source: LayerStream) -> bool:
        last = 0 if self.config.layerwise else source.num_layers - 1
        return source.ready(last)

    def _prepare(self, request: _Request, item: BatchItem, span: ArenaSpan) -> _Forward:
        """Submits the stages and the push of one request's chunk."""
        admit = request.admit
        assert admit is not None
        hit_tokens = request.hit_blocks * self.config.block_tokens
        earlier = item.cached - hit_tokens  # computed by earlier chunks, in the DE buffer
        streams = [
            self.traffic.make_stream((hit_tokens > 0) + (earlier > 0)),
            self.traffic.make_stream(1),
            self.traffic.make_stream(2),
        ]
        deadline = time.monotonic() + self.config.deadline_s
        sequence = StreamedSequence(self.arena, span, *streams, deadline)
        forward = _Forward(request, item, span, sequence)
        remote = np.frombuffer(admit.block_starts, "<u8")
        common: dict[str, Any] = {
            "cache": self.arena.cache,
            "pages": span.pages,
            "timeout_s": self.config.deadline_s,
            "trace_id": request.request_id,
        }
        peer = self._peers.get(request.assign.decode, 2**32 - 1)
        stage = {**common, "into": sequence.ready, "gate": sequence.released}
        if hit_tokens and len(request.slots):
            forward.tickets.append(
                self.traffic.stage(
                    **stage,
                    block_starts=self.pool.payload_offsets(request.slots),
                    first_token=0,
                    num_tokens=hit_tokens,
                    slots=request.slots,
                    after=request.source,
                )
            )
        elif hit_tokens:
            forward.tickets.append(
                self.traffic.stage_from_peer(
                    **stage,
                    block_starts=remote,
                    first_token=0,
                    num_tokens=hit_tokens,
                    after=request.source,
                    peer=peer,
                )
            )
        if earlier:
            forward.tickets.append(
                self.traffic.stage_from_peer(
                    **stage,
                    block_starts=remote,
                    first_token=hit_tokens,
                    num_tokens=earlier,
                    peer=peer,
                )
            )
        # PE path: the DE gets the hit tokens with the first chunk. DE path: it has them.
        send_hits = request.chunks == 0 and len(request.slots) > 0
        first = 0 if send_hits else item.cached
        forward.tickets.append(
            self.traffic.push(
                **common,
                block_starts=remote,
                first_token=first,
                num_tokens=item.cached + item.new - first,
                after=sequence.computed,
                into=sequence.released,
                peer=peer,
                tag=admit.tag,
            )
        )
        return forward

    def _run(self, batch: list[_Forward]) -> None:
        begin_ns = time.monotonic_ns()
        slices = [
            SequenceSlice(
                f.sequence,
                f.item.cached,
                f.request.tokens[f.item.cached : f.item.cached + f.item.new],
            )
            for f in batch
        ]
        try:
            logits = self.runner.forward(slices)
            for forward in batch:
                self._drain(forward, cancel=False)
        except KVTransferError as error:
            self._abandon(batch, error)
            return
        end_ns = time.monotonic_ns()
        infos = [describe_logits(row, self.config.journal) for row in logits]
        tokens = logits.argmax(dim=-1).tolist()
        if self.config.journal:
            self.forwards.append(
                (
                    begin_ns,
                    [
                        (f.request.request_id, f.item.cached, f.item.new, info.digest)
                        for f, info in zip(batch, infos, strict=True)
                    ],
                )
            )
        for forward in batch:
            self._account(forward, batch, end_ns)
        for forward, info, token in zip(batch, infos, tokens, strict=True):
            self.arena.free(forward.span)
            self._advance(forward, info, int(token), end_ns)

    def _drain(self, forward: _Forward, cancel: bool) -> None:
        """Waits until no transfer of this forward can touch the device any more."""
        for ticket in forward.tickets:
            if cancel:
                ticket.cancel()
            ticket.wait(self.config.deadline_s + 1.0)
            if not cancel:
                ticket.check()

    def _account(self, forward: _Forward, batch: list[_Forward], end_ns: int) -> None:
        request, waits = forward.request, forward.sequence.waits
        stall = np.array([end - begin for begin, end in waits]) * 1e-9
        ends = [begin for begin, _ in batch[0].sequence.waits[1:]] + [end_ns]
        starts = [end for _, end in batch[-1].sequence.waits]
        compute = np.array([e - s for s, e in zip(starts, ends, strict=True)]) * 1e-9
        request.stall_s = stall if request.stall_s is None else request.stall_s + stall
        request.compute_s = compute if request.compute_s is None else request.compute_s + compute
        request.device_tokens = max(request.device_tokens, forward.item.cached + forward.item.new)
        if self.config.trace and forward is batch[0]:
            for layer, (begin, end) in enumerate(waits):
                if end - begin > 50_000:
                    self.spans.append((f"stall {layer}", request.request_id, begin, end))
            for layer, (begin, end) in enumerate(zip(starts, ends, strict=True)):
                self.spans.append((f"layer {layer}", request.request_id, begin, end))

    def _advance(self, forward: _Forward, info: Any, token: int, end_ns: int) -> None:
        request, item = forward.request, forward.item
        request.computed = item.cached + item.new
        request.chunks += 1
        if request.computed < len(request.tokens):
            return
        assert request.admit is not None
        assert request.stall_s is not None
        assert request.compute_s is not None
        stats = PrefillStats(
            hit_blocks=request.hit_blocks,
            chunks=request.chunks,
            load_s=request.load.seconds if request.load else 0.0,
            load_end_ns=request.load.end_ns if request.load else 0,
            loaded_bytes=request.load.num_bytes if request.load else 0,
            stall_s=request.stall_s.tolist(),
            compute_s=request.compute_s.tolist(),
            begin_ns=request.begin_ns,
            first_token_ns=end_ns,
            device_tokens=request.device_tokens,
        )
        self._tell_decode(
            request,
            PrefillDone(
                request_id=request.request_id,
                life=request.assign.life,
                attempt=request.admit.attempt,
                arrivals=request.chunks,
                first_token=token,
                logits=info,
                stats=stats,
            ),
        )
        self._drop(request)

    # ------------------------------------------------------------------ when things go wrong

    def _abandon(self, batch: list[_Forward], error: KVTransferError) -> None:
        """The forward failed: drain every transfer, then start its requests anew."""
        log.warning("%s: forward abandoned: %s", self.name, error)
        for forward in batch:
            self._drain(forward, cancel=True)
            self.arena.free(forward.span)
        for forward in batch:
            self._restart(forward.request, str(error))

    def _restart(self, request: _Request, reason: str) -> None:
        admit = request.admit
        assert admit is not None
        most = admit.max_hit_blocks
        if request.load is not None:
            # All reads have to be through before the blocks' verdict is final.
            request.load.cancel()
            request.load.wait(self.config.deadline_s + 1.0)
            if request.load.error is not None:
                reason = request.load.error[1]
                most = min(most, request.load.blocks)
        self._reset(request)
        if admit.attempt + 1 >= self.config.max_attempts:
            self._give_up(request, f"{admit.attempt + 1} attempts failed, the last with: {reason}")
            return
        self._tell_decode(
            request,
            Restart(
                request_id=request.request_id,
                life=admit.life,
                attempt=admit.attempt,
                max_hit_blocks=most,
                reason=reason,
            ),
        )

    def _tell_decode(self, request: _Request, message: Message) -> None:
        socket = self._sockets.get(request.assign.decode)
        if socket is not None:  # else its loss was reported and the request comes back
            send(socket, message)

    def _give_up(self, request: _Request, reason: str) -> None:
        self._tell_decode(
            request,
            GaveUp(request_id=request.request_id, life=request.assign.life, reason=reason),
        )
        self._drop(request)

    def _reset(self, request: _Request) -> None:
        """Back to before its admission; nothing is in flight afterwards."""
        if request.load is not None:
            request.load.cancel()
            request.load.wait(self.config.deadline_s + 1.0)
        if len(request.slots):
            self.pool.release(request.slots)
        if request.receive_tag is not None:
            self.traffic.close_receive(request.receive_tag)
        request.admit = None
        request.begun = False
        request.hit_blocks = request.computed = request.chunks = 0
        request.slots = NO_SLOTS
        request.load = request.source = request.receive_tag = None
        request.stall_s = request.compute_s = None

    def _drop(self, request: _Request) -> None:
        self._reset(request)
        del self._requests[request.request_id]
        self._order.remove(request.request_id)
