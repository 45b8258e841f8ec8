"""The prefill engine: admit, load, compute layer by layer, publish.

A request's hit prefix comes from the PE buffer (PE read path), is read from the DE buffer (DE read
path), or both (split: the DE loads its head, we its tail); later chunks of a chunked prefill read what
earlier ones sent to the DE buffer. The loop only handles messages and starts work; forwards run in one
compute thread, so that loads start and peers are answered while a layer is being waited for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import zmq

from kvtransfer.engine.base import Engine, send
from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.forward import (
    NO_PEER,
    Chunk,
    ForwardPass,
    PrefillRequest,
    Transfers,
)
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
from kvtransfer.engine.prefix import PrefixLoader, layers_ready
from kvtransfer.engine.storage import failed_itself, is_unwell
from kvtransfer.scheduler import PrefillWork, form_batch

__all__ = ["LAYER_SLOTS", "PrefillEngine"]

log = logging.getLogger(__name__)
LAYER_SLOTS = 3  # one computing, one loading, one leaving
CONNECT_TIMEOUT_S = 10.0
LEAD_MARGIN_S = 0.01


class PrefillEngine(Engine):
    kind = "prefill"

    def __init__(self, config: ClusterConfig, name: str) -> None:
        super().__init__(config, name, LAYER_SLOTS, config.prefill_tokens)
        self._transfers = Transfers(config, self.traffic, self.pool, self.arena)
        self._prefixes = PrefixLoader(config, self.traffic, self.store, self.pool, self.parts)
        self._requests: dict[int, PrefillRequest] = {}
        self._order: deque[int] = deque()
        self._early_admits: dict[int, Admit] = {}
        self._peers: dict[str, int] = {}
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._forward: tuple[ForwardPass, Future[None]] | None = None
        self._done_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.poller.register(self._done_fd, zmq.POLLIN)
        self._compute_ratio = 1.0  # measured / predicted seconds of recent forwards

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
            self._on_lost(message)

    def _connect(self, engine: str) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self.name.encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self.config.control_address(engine))
        self._sockets[engine] = socket
        self.poller.register(socket, zmq.POLLIN)
        address = self.config.listen_address(engine)
        self._peers[engine] = self.traffic.connect(address, CONNECT_TIMEOUT_S)
        send(socket, PeerHello(engine=self.name))

    def _on_assign(self, message: Assign) -> None:
        known = self._requests.get(message.request_id)
        if known is not None:
            if known.assign.life >= message.life:
                return
            self._drop(known)
        self._requests[message.request_id] = PrefillRequest(message, unpack_tokens(message.tokens))
        self._order.append(message.request_id)
        early = self._early_admits.pop(message.request_id, None)
        if early is not None:
            self._on_admit(early)

    def _on_admit(self, message: Admit) -> None:
        request = self._requests.get(message.request_id)
        if request is None or request.assign.life < message.life:
            self._early_admits[message.request_id] = message
        elif request.assign.life == message.life:
            request.admit = message

    def _on_lost(self, message: EngineLost) -> None:
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
        own = [r.assign.cached_tokens - r.assign.decode_tokens for r in requests]
        waiting = sum(n for n, r in zip(own, requests, strict=True) if not r.begun)
        return Report(
            engine=self.name,
            unfinished_requests=len(requests),
            unfinished_tokens=sum(len(r.tokens) for r in requests),
            read_queue_tokens=self.traffic.read_queue_tokens + waiting,
            read_tokens_per_s=self.read_rate.tokens_per_s,
            free_tokens=0,
            network_tokens=2 * sum(own),
            memory_tokens=2 * sum(own),
            seen=[r.request_id for r in requests],
        )

    # ------------------------------------------------------------------ a request's life

    def work(self) -> bool:
        self._collect_forward()
        for request_id in list(self._order):
            request = self._requests[request_id]
            if request.admit is not None and not request.begun:
                self._begin(request)
            if request.begun:
                self._watch_split(request)
        if self._forward is None:
            chunks = self._form_batch()
            if chunks:
                self._start_forward(ForwardPass(chunks))
        return False

    def _begin(self, request: PrefillRequest) -> None:
        """Starts our part of the load and asks the DE to tell of its own."""
        admit = request.admit
        assert admit is not None
        if len(request.tokens) > self.arena.num_tokens:
            self._give_up(
                request,
                f"{len(request.tokens)} tokens don't fit the prefill device memory of "
                f"{self.arena.num_tokens} tokens per layer",
            )
            return
        request.begin_ns = time.monotonic_ns()
        request.first_begin_ns = request.first_begin_ns or request.begin_ns
        request.hit_blocks = request.decode_blocks = admit.hit_blocks
        if admit.pe_reads and not self._prefixes.begin(request, admit):
            return
        if admit.hit_blocks:
            request.remote = self.traffic.make_stream(1)
            request.receive_tag = self.traffic.open_receive(request.remote)
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

    # ------------------------------------------------------------------ forwards

    def _form_batch(self) -> list[Chunk]:
        """FIFO over the requests worth starting, under the compute quota."""
        ready = [self._requests[i] for i in self._order if self._startable(self._requests[i])]
        work = [PrefillWork(r.request_id, r.computed, len(r.tokens) - r.computed) for r in ready]
        items = form_batch(
            work, self.config.attention_time, self.config.quota_s, self.arena.num_tokens
        )
        chunks = []
        for item in items:
            span = self.arena.allocate(item.cached + item.new)
            if span is None:  # page rounding: goes into the next batch
                break
            request = self._requests[item.request_id]
            peer = self._peers.get(request.assign.decode, NO_PEER)
            chunks.append(Chunk(self._transfers, request, item, span, peer))
        return chunks

    def _startable(self, request: PrefillRequest) -> bool:
        """True when all but one of the missing layers should arrive within the computation.

        Starting earlier would hold the device for nothing but waiting (docs/decisions/0003); the one
        layer is the grain at which arrivals are seen.
        """
        if not request.begun or request.doomed:
            return False
        sources = [s for s in (request.source, request.remote) if s is not None]
        if not sources or any(source.failed for source in sources):
            return True  # nothing to wait for, or the failure is the forward's to report
        layers = sources[0].num_layers
        arrived = min(layers_ready(source) for source in sources)
        if arrived == layers:
            return True
        if arrived == 0 or not self.config.layerwise:
            return False
        elapsed = (time.monotonic_ns() - request.begin_ns) * 1e-9
        left = elapsed / arrived * (layers - arrived - 1)
        return left <= self._predicted_s(request) + LEAD_MARGIN_S

    def _predicted_s(self, request: PrefillRequest) -> float:
        new = len(request.tokens) - request.computed
        seconds = self.config.attention_time.seconds([(request.computed, new)])
        return seconds * self._compute_ratio

    def _start_forward(self, forward: ForwardPass) -> None:
        future = self._compute.submit(forward.run, self.runner, self.config.journal)
        future.add_done_callback(lambda _: os.eventfd_write(self._done_fd, 1))
        self._forward = (forward, future)

    def _collect_forward(self) -> None:
        with contextlib.suppress(BlockingIOError):  # nothing rung, or not yet: done() comes first
            os.eventfd_read(self._done_fd)
        if self._forward is None or not self._forward[1].done():
            return
        forward, future = self._forward
        self._forward = None
        future.result()  # an error that isn't ours ends the engine
        for chunk in forward.chunks:
            self.arena.free(chunk.span)
        if forward.error is not None:
            log.warning("%s: forward abandoned: %s", self.name, forward.error)
            for chunk in forward.chunks:
                self._restart(chunk.request, str(forward.error))
            return
        forward.account()
        self._calibrate(forward)
        if self.config.journal:
            self.forwards.append(forward.journal_entry())
        if self.config.trace:
            self.spans += forward.spans()
        for index, chunk in enumerate(forward.chunks):
            self._advance(forward, index, chunk)

    def _calibrate(self, forward: ForwardPass) -> None:
        """Follows how far the fitted time model is off for whole forwards on this machine."""
        _, computes = forward.layer_times()
        measured = sum(end - begin for begin, end in computes) * 1e-9
        items = [(chunk.item.cached, chunk.item.new) for chunk in forward.chunks]
        predicted = self.config.attention_time.seconds(items)
        if predicted > 0:
            self._compute_ratio += 0.3 * (measured / predicted - self._compute_ratio)

    def _advance(self, forward: ForwardPass, index: int, chunk: Chunk) -> None:
        request, item = chunk.request, chunk.item
        if request.doomed:
            self._drop(request)
            return
        request.computed = item.cached + item.new
        request.chunks += 1
        if request.computed < len(request.tokens):
            return
        assert request.admit is not None
        self._tell_decode(
            request,
            PrefillDone(
                request_id=request.request_id,
                life=request.assign.life,
                attempt=request.admit.attempt,
                arrivals=request.chunks,
                first_token=forward.next_tokens[index],
                logits=forward.infos[index],
                stats=self._stats(request, forward.end_ns),
            ),
        )
        self._drop(request)

    @staticmethod
    def _stats(request: PrefillRequest, end_ns: int) -> PrefillStats:
        assert request.stall_s is not None
        assert request.compute_s is not None
        load = request.load
        return PrefillStats(
            hit_blocks=request.hit_blocks,
            chunks=request.chunks,
            load_s=request.kept_s + (load.seconds if load else 0.0),
            load_end_ns=load.end_ns if load else 0,
            loaded_bytes=request.kept_bytes + (load.num_bytes if load else 0),
            stall_s=request.stall_s.tolist(),
            compute_s=request.compute_s.tolist(),
            begin_ns=request.first_begin_ns,
            first_token_ns=end_ns,
            device_tokens=request.device_tokens,
        )

    # ------------------------------------------------------------------ when things go wrong

    def _restart(self, request: PrefillRequest, reason: str) -> None:
        """Its forward failed and is drained: admitted anew, without the blocks that were bad."""
        if request.doomed:
            self._drop(request)
            return
        admit = request.admit
        assert admit is not None
        most = admit.max_hit_blocks
        unwell: Literal["", "pe", "de"] = ""
        if request.load is not None:
            # All reads have to be through before the blocks' verdict is final.
            request.load.cancel()
            request.load.wait(self.config.deadline_s + 1.0)
            if failed_itself(request.load):
                assert request.load.error is not None
                reason = request.load.error[1]
                unwell = "pe" if is_unwell(request.load) else ""
                most = min(most, request.decode_blocks + request.load.blocks)
        self._begin_again(request, most, reason, unwell)

    def _watch_split(self, request: PrefillRequest) -> None:
        """Before its forward: when one side of its split is far behind, the other reads its part."""
        admit = request.admit
        if admit is None or self._is_running(request) or request.chunks:
            return
        slow = self._prefixes.slow_side(request)
        if slow is not None and admit.attempt + 1 < self.config.max_attempts:
            reason = f"the {slow.upper()} is slow to read its part of a split"
            self._begin_again(request, admit.max_hit_blocks, reason, slow, keep=slow == "de")

    def _begin_again(
        self,
        request: PrefillRequest,
        most: int,
        reason: str,
        unwell: Literal["", "pe", "de"],
        *,
        keep: bool = False,
    ) -> None:
        """Asks the DE for another attempt with at most ``most`` blocks of the prefix."""
        admit = request.admit
        assert admit is not None
        self._reset(request, keep=keep)
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
                unwell=unwell,
            ),
        )

    def _tell_decode(self, request: PrefillRequest, message: Message) -> None:
        socket = self._sockets.get(request.assign.decode)
        if socket is not None:  # else its loss was reported and the request comes back
            send(socket, message)

    def _give_up(self, request: PrefillRequest, reason: str) -> None:
        life = request.assign.life
        self._tell_decode(request, GaveUp(request_id=request.request_id, life=life, reason=reason))
        self._drop(request)

    def _reset(self, request: PrefillRequest, *, keep: bool = False) -> None:
        """Back to before its admission, but for what was loaded if that is to be kept. REQUIRES: no
        forward of it is running."""
        self._prefixes.end(request, keep=keep)
        if request.receive_tag is not None:
            self.traffic.close_receive(request.receive_tag)
        request.admit = None
        request.begun = False
        request.hit_blocks = request.decode_blocks = request.computed = request.chunks = 0
        request.remote = request.receive_tag = None
        request.progress = None
        request.stall_s = request.compute_s = None

    def _is_running(self, request: PrefillRequest) -> bool:
        return self._forward is not None and any(
            chunk.request is request for chunk in self._forward[0].chunks
        )

    def _drop(self, request: PrefillRequest) -> None:
        """Forgets a request, at once or when its running forward has come to its end."""
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
            self._order.remove(request.request_id)
        if self._forward is not None:
            running = [c for c in self._forward[0].chunks if c.request is request]
            if running:
                request.doomed = True
                for ticket in running[0].tickets:
                    ticket.cancel()
                return
        self._reset(request)

    def _close(self) -> None:
        self._compute.shutdown(wait=True)
        super()._close()
        os.close(self._done_fd)
