"""The scheduler process: the pure Scheduler behind a ROUTER socket."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

import zmq

from kvtransfer.engine.base import send
from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.messages import (
    Assign,
    EngineLost,
    Finished,
    Hello,
    Journal,
    Message,
    Report,
    Result,
    Shutdown,
    Started,
    Submit,
    decode_message,
    unpack_tokens,
)
from kvtransfer.errors import Mismatch
from kvtransfer.keys import chain_keys
from kvtransfer.scheduler import Assignment, EngineReport, Limits, Request, Scheduler
from kvtransfer.store import BlockStore

__all__ = ["CLIENT", "SchedulerProcess"]

log = logging.getLogger(__name__)
CLIENT = "client"
MAX_LIVES = 4


@dataclass
class _Pending:
    submit: Submit
    submitted_ns: int
    assigned_ns: int = 0
    life: int = 0
    engines: tuple[str, str] = ("", "")


class SchedulerProcess:
    """Single-threaded: a message comes in, the policy answers, assignments go out."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self._policy = Scheduler(
            Limits(config.alpha, config.beta),
            config.path,
            block_tokens=config.block_tokens,
            balance=config.balance,
            network_tokens_per_s=config.network_cap / config.layout.bytes_per_token or math.inf,
        )
        self._pending: dict[int, _Pending] = {}
        self._epochs: dict[str, int] = {}
        self._expected = {*config.prefill_engines, *config.decode_engines}
        self._capacity: dict[str, int] = {}  # tokens of each engine's device memory
        self._journals: set[str] = set()
        self._started = False
        self._running = True
        self._root_key = config.root_key
        self._store = BlockStore(config.store, self._root_key, config.layout)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(config.scheduler_address)

    def run(self) -> None:
        while self._running:
            frames = self._socket.recv_multipart()
            if len(frames) != 2:
                continue
            sender = frames[0].decode(errors="replace")
            try:
                self._handle(decode_message(frames[1]), sender)
            except Mismatch as error:
                log.warning("scheduler: dropped a message of %s: %s", sender, error)
                continue
            for assignment in self._policy.fetch(time.monotonic()) if self._started else []:
                self._dispatch(assignment)
        self._context.destroy(linger=2000)

    def _handle(self, message: Message, sender: str) -> None:
        if isinstance(message, Report):
            self._on_report(message)
        elif isinstance(message, Submit):
            self._on_submit(message)
        elif isinstance(message, Finished):
            self._on_finished(message)
        elif isinstance(message, Hello):
            self._on_hello(message)
        elif isinstance(message, EngineLost):
            self._on_lost(message)
        elif isinstance(message, Journal):
            send(self._socket, message, to=CLIENT)
            self._journals.add(message.engine)
            self._running = not self._journals >= self._expected
        elif isinstance(message, Shutdown):
            for engine in self._expected:
                send(self._socket, Shutdown(), to=engine)
            self._running = bool(self._expected)

    def _on_hello(self, message: Hello) -> None:
        """Everyone speaks first, the client too: a ROUTER drops what it sends to a stranger."""
        self._epochs[message.engine] = message.epoch
        if message.engine != CLIENT:
            self._add_engine(message)
        if not self._started and self._epochs.keys() >= {*self._expected, CLIENT}:
            self._started = True
            prefill, decode = self._policy.engines
            for receiver in (*prefill, CLIENT):
                send(self._socket, Started(prefill=prefill, decode=decode), to=receiver)

    def _add_engine(self, message: Hello) -> None:
        self._capacity[message.engine] = message.capacity_tokens
        report = EngineReport(
            message.engine,
            group=message.kind,
            node=message.engine,
            free_tokens=message.capacity_tokens,
        )
        if message.kind == "prefill":
            self._policy.add_prefill(report)
        else:
            self._policy.add_decode(report)

    def _on_report(self, message: Report) -> None:
        if message.engine not in self._expected:
            return  # lost already
        kind = "prefill" if message.engine in self._policy.engines[0] else "decode"
        self._policy.report(
            EngineReport(
                message.engine,
                group=kind,
                node=message.engine,
                unfinished_requests=message.unfinished_requests,
                unfinished_tokens=message.unfinished_tokens,
                read_queue_tokens=message.read_queue_tokens,
                free_tokens=message.free_tokens,
                read_tokens_per_s=message.read_tokens_per_s,
                network_tokens=message.network_tokens,
                memory_tokens=message.memory_tokens,
                at_s=time.monotonic(),
            ),
            frozenset(message.seen),
        )

    def _on_submit(self, message: Submit) -> None:
        tokens = unpack_tokens(message.tokens)
        keys = chain_keys(self._root_key, tokens[:-1], self.config.block_tokens)
        cached = self._store.lookup(keys, self._root_key) * self.config.block_tokens
        self._pending[message.request_id] = _Pending(message, time.monotonic_ns())
        needed = len(tokens) + message.num_generate
        largest = max((self._capacity[name] for name in self._policy.engines[1]), default=0)
        if needed > largest:  # it would wait for ever
            reason = f"{needed} tokens of device memory are needed, the largest decode engine has "
            error = reason + str(largest)
            self._complete(Finished(request_id=message.request_id, life=0, error=error))
            return
        self._policy.submit(Request(message.request_id, len(tokens), cached, message.num_generate))

    def _dispatch(self, assignment: Assignment) -> None:
        pending = self._pending[assignment.request.request_id]
        pending.life += 1
        pending.engines = (assignment.prefill, assignment.decode)
        pending.assigned_ns = pending.assigned_ns or time.monotonic_ns()
        message = Assign(
            request_id=assignment.request.request_id,
            life=pending.life,
            tokens=pending.submit.tokens,
            num_generate=pending.submit.num_generate,
            prefill=assignment.prefill,
            decode=assignment.decode,
            read_path=assignment.read_path,
            cached_tokens=assignment.request.cached_tokens,
            decode_tokens=assignment.decode_tokens,
        )
        for engine in pending.engines:
            send(self._socket, message, to=engine)

    def _on_finished(self, message: Finished) -> None:
        pending = self._pending.get(message.request_id)
        if pending is None or pending.life != message.life:
            return  # an earlier life's answer
        self._complete(message)

    def _complete(self, message: Finished) -> None:
        pending = self._pending.pop(message.request_id)
        self._policy.finish(message.request_id)
        result = Result(
            finished=message,
            submitted_ns=pending.submitted_ns,
            assigned_ns=pending.assigned_ns,
            lives=pending.life,
        )
        send(self._socket, result, to=CLIENT)

    def _on_lost(self, message: EngineLost) -> None:
        """Its requests run elsewhere, if there is an elsewhere; the others are told."""
        self._expected.discard(message.engine)
        for engine in self._expected:
            send(self._socket, message, to=engine)
        requests = self._policy.engine_lost(message.engine)
        prefill, decode = self._policy.engines
        for request in list(requests if prefill and decode else self._all_requests()):
            pending = self._pending[request.request_id]
            if prefill and decode and pending.life < MAX_LIVES:
                continue
            reason = f"{message.engine} was lost ({message.reason})"
            if not (prefill and decode):
                reason += f" and no {'decode' if prefill else 'prefill'} engine is left"
            self._complete(Finished(request_id=request.request_id, life=pending.life, error=reason))

    def _all_requests(self) -> list[Request]:
        return [Request(i, 0) for i in self._pending]
