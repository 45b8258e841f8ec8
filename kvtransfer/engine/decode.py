"""The decode engine: admit (reserve the DE buffer), receive, decode with continuous batching, persist.

On the DE read path it also loads the hit prefix into the DE buffer and serves it to the PE; of a split
prefix it loads the head.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import zmq

from kvtransfer.engine.base import Engine, describe_logits, send
from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.messages import (
    Admit,
    Assign,
    EngineLost,
    Finished,
    GaveUp,
    Message,
    PeerHello,
    PrefillDone,
    Pull,
    Report,
    Restart,
    pack_tokens,
    unpack_tokens,
)
from kvtransfer.engine.persist import NO_SLOTS, DecodeRequest, Persister, Side
from kvtransfer.engine.sequences import ResidentSequence
from kvtransfer.engine.storage import failed_itself, is_unwell
from kvtransfer.keys import chain_keys
from kvtransfer.models import SequenceSlice
from kvtransfer.stream import LayerStream
from kvtransfer.transport import Ticket

__all__ = ["DecodeEngine"]


class DecodeEngine(Engine):
    kind = "decode"

    def __init__(self, config: ClusterConfig, name: str) -> None:
        super().__init__(config, name, 0, config.decode_tokens)
        self._control = self._context.socket(zmq.ROUTER)
        self._control.setsockopt(zmq.LINGER, 0)
        self._control.bind(config.control_address(name))
        self.poller.register(self._control, zmq.POLLIN)
        self._persister = Persister(config, self.traffic, self.pool, self.arena)
        self._requests: dict[int, DecodeRequest] = {}
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
            request = self._current(message.request_id, message.life, message.attempt)
            if request is not None:
                request.restart = message
                self._cancel_load(request)
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

    def _current(self, request_id: int, life: int, attempt: int) -> DecodeRequest | None:
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
        request = DecodeRequest(message, tokens.tolist(), len(tokens), keys)
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

    def _restart(self, request: DecodeRequest, message: Restart) -> None:
        """Another attempt. REQUIRES: the load of the last one is done."""
        load, request.restart = request.load, None
        reason, unwell = message.reason, message.unwell
        self._blame(request, unwell or "pe", bool(unwell), message.max_hit_blocks)
        if load is not None and load.error is None:  # what it brought needn't be read again
            self._account_load(request, load)
            request.good_blocks = request.hit_blocks
        elif load is not None and failed_itself(load) and unwell != "de":
            assert load.error is not None
            reason = load.error[1]
            self._blame(request, "de", is_unwell(load), request.good_blocks + load.blocks)
        request.failures.append(reason)
        self._close_receive(request)
        request.attempt += 1
        if load is not None and load.error is not None:
            self._admit_again(request)
        else:
            self._offer(request)

    def _admit_again(self, request: DecodeRequest) -> None:
        """With other slots: a read that hung may still come back and write into these."""
        request.good_blocks = 0
        self._release_buffer(request)
        assert request.span is not None
        self.arena.free(request.span)
        request.span = None
        self._waiting.appendleft(request.request_id)

    @staticmethod
    def _blame(request: DecodeRequest, side: Side, unwell: bool, good_blocks: int) -> None:
        """The first side whose storage fails is left to the other, which may restore more. What is bad
        or gone is so for both, and after that one nobody is left: the prefix shrinks."""
        if unwell and request.unwell is None:
            request.unwell = side
        else:
            request.max_hit_blocks = min(request.max_hit_blocks, good_blocks)

    def _on_lost(self, message: EngineLost) -> None:
        self._connected.discard(message.engine)
        self._unsent.pop(message.engine, None)
        for request in list(self._requests.values()):
            if request.assign.prefill == message.engine and not request.decoding:
                self._drop(request)

    def make_report(self) -> Report:
        requests = list(self._requests.values())
        waiting = [self._requests[i] for i in self._waiting]
        moving = [r for r in requests if not r.decoding]
        return Report(
            engine=self.name,
            unfinished_requests=len(requests),
            unfinished_tokens=sum(len(r.tokens) for r in requests),
            read_queue_tokens=self.traffic.read_queue_tokens
            + sum(r.assign.decode_tokens for r in waiting),
            read_tokens_per_s=self.read_rate.tokens_per_s,
            free_tokens=max(self.arena.free_tokens - sum(r.wanted_tokens for r in waiting), 0),
            network_tokens=sum(r.assign.decode_tokens for r in moving),
            memory_tokens=sum(2 * r.prompt_tokens + r.assign.decode_tokens for r in moving),
            seen=[r.request_id for r in requests],
        )

    # ------------------------------------------------------------------ a request's life

    def work(self) -> bool:
        while self._waiting and self._admit(self._requests[self._waiting[0]]):
            pass
        for request in list(self._requests.values()):
            if request.restart is not None:
                if request.load is None or request.load.done:
                    self._restart(request, request.restart)
            elif not request.decoding and self._arrived(request):
                self._land(request)
        active = [r for r in self._requests.values() if r.decoding and not r.complete]
        if active:
            self._step(active)
        for request in list(self._requests.values()):
            if request.complete and self._persister.done(request):
                self._finish(request)
        self._check_deadlines()
        return bool(active)

    def _admit(self, request: DecodeRequest) -> bool:
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

    def _offer(self, request: DecodeRequest) -> None:
        """Starts an attempt: opens the receive, begins the load (DE path), tells the PE."""
        request.prefill_done = None
        request.admitted_at = time.monotonic()
        request.receive = self.traffic.make_stream(LayerStream.UNKNOWN)
        request.tag = self.traffic.open_receive(request.receive)
        request.hit_blocks = 0
        request.load = request.source = request.serve = None
        if "de" in request.readers:
            self._begin_load(request)
        starts = self.pool.payload_offsets(request.slots)
        message = Admit(
            request_id=request.request_id,
            life=request.assign.life,
            attempt=request.attempt,
            hit_blocks=request.hit_blocks,
            max_hit_blocks=request.max_hit_blocks,
            pe_reads="pe" in request.readers,
            block_starts=starts.astype("<u8").tobytes(),
            tag=request.tag,
        )
        engine = request.assign.prefill
        if engine in self._connected:
            send(self._control, message, to=engine)
        else:
            self._unsent.setdefault(engine, []).append(message)

    def _begin_load(self, request: DecodeRequest) -> None:
        most = request.max_hit_blocks
        if "pe" in request.readers:
            most = min(most, request.assign.decode_tokens // self.config.block_tokens)
        keys = request.keys[:most]
        kept = min(request.good_blocks, most)
        request.hit_blocks = hit = max(self.store.lookup(keys, self.root_key), kept)
        if hit == 0:
            return
        request.source = self.traffic.make_stream(hit - kept)
        if hit == kept:
            return
        request.load = self.traffic.load(
            keys=keys[kept:hit],
            parent=keys[kept - 1].tobytes() if kept else self.root_key,
            slots=request.slots[kept:hit],
            parts=self.parts,
            into=request.source,
            timeout_s=self.config.deadline_s,
            trace_id=request.request_id,
        )

    def _arrived(self, request: DecodeRequest) -> bool:
        stream = request.receive
        if request.prefill_done is None or stream is None:
            return False
        return all(stream.ready(layer) for layer in range(stream.num_layers))

    @staticmethod
    def _account_load(request: DecodeRequest, load: Ticket) -> None:
        request.load_s += load.seconds
        request.load_end_ns = load.end_ns
        request.loaded_bytes += load.num_bytes

    def _land(self, request: DecodeRequest) -> None:
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
            self._account_load(request, request.load)
        full = request.prompt_tokens // self.config.block_tokens
        request.persisted = done.stats.hit_blocks
        if full > request.persisted:
            self._persister.hand_over(request, full, request.slots[request.persisted : full])
        self._release_buffer(request)
        request.decoding = True
        request.decode_begin_ns = time.monotonic_ns()
        request.logits.append(done.logits)
        request.tokens.append(done.first_token)

    def _step(self, active: list[DecodeRequest]) -> None:
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
            self._persister.generated(request)

    def _finish(self, request: DecodeRequest) -> None:
        done = request.prefill_done
        assert done is not None
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
                fresh_blocks=request.fresh_blocks,
                stats=done.stats,
                decode_begin_ns=request.decode_begin_ns,
                finished_ns=time.monotonic_ns(),
            )
        )
        # An agent's next turn reads these again: they are staged while its tool runs.
        staged = min(request.persisted, self.config.memory_blocks)
        if staged:
            self.traffic.prefetch(keys=request.keys[:staged], parent=self.root_key)
        self._drop(request)

    # ------------------------------------------------------------------ when things go wrong

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for request in list(self._requests.values()):
            begun = request.admitted_at > 0 and not request.decoding
            # Every transfer has its own deadline; this one catches a PE that went silent, and a
            # store that keeps hold of the buffers.
            if begun and now - request.admitted_at > 2 * self.config.deadline_s:
                what = f"{request.assign.prefill} sent nothing"
                if request.receive is None:
                    what = "its buffer could not be had again"
                self._fail(request, f"{what} within the deadline")

    def _fail(self, request: DecodeRequest, reason: str) -> None:
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

    @staticmethod
    def _cancel_load(request: DecodeRequest) -> None:
        for ticket in (request.serve, request.load):
            if ticket is not None:
                ticket.cancel()

    def _drain_load(self, request: DecodeRequest) -> None:
        self._cancel_load(request)
        for ticket in (request.serve, request.load):
            if ticket is not None:
                ticket.wait(self.config.deadline_s + 1.0)

    def _close_receive(self, request: DecodeRequest) -> None:
        if request.tag is not None:
            self.traffic.close_receive(request.tag)
        request.tag = request.receive = None

    def _release_buffer(self, request: DecodeRequest) -> None:
        self._close_receive(request)
        if len(request.slots):
            self.pool.release(request.slots)
        request.slots = NO_SLOTS

    def _drop(self, request: DecodeRequest) -> None:
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
