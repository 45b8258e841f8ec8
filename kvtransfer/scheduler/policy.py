"""The request scheduler: which (PE, DE) pair and which read path, as one deterministic object.

It is told what happened (submit, report, fetch, finish, lost) and answers with assignments. The live
scheduler process and the simulator drive the same object.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from kvtransfer.errors import InvalidArgument
from kvtransfer.scheduler.aware import AwareDecode, Speeds, aged, quicker_side
from kvtransfer.scheduler.baselines import PREFILL_POLICIES, Balance, DecodeBaseline
from kvtransfer.scheduler.decode import DecodeGroups
from kvtransfer.scheduler.prefill import PrefillEngines
from kvtransfer.scheduler.read_path import choose_side, split_decode_tokens
from kvtransfer.scheduler.types import (
    Assignment,
    Disk,
    EngineLoad,
    EngineReport,
    Limits,
    ReadPath,
    Request,
)

__all__ = ["PathPolicy", "Scheduler"]

PathPolicy = Literal["pe", "de", "auto", "split"]
"""``pe`` and ``de`` read on one side only, ``auto`` on the shorter queue's, ``split`` on both."""


@dataclass(slots=True, eq=False)
class _Engine:
    """An engine, and what it was given that is in no report of its own yet: (request, reads). Its group
    and node are those it was added with."""

    group: str
    node: str
    report: EngineReport
    load: EngineLoad
    unreported: dict[int, tuple[Request, int]] = field(default_factory=dict)

    def forget(self, request_id: int) -> None:
        _, reads = self.unreported.pop(request_id)
        self.load.disk.unreported_tokens -= reads

    def recount(self) -> None:
        self.load.set(self.report)
        for request, _ in self.unreported.values():
            self.load.take(request)


@dataclass(slots=True, eq=False)
class _Placement:
    request: Request
    serial: int
    prefill: _Engine | None = None
    decode: _Engine | None = None
    assigned: bool = False  # its engines have been told


class Scheduler:
    """Not thread-safe. Every request submitted is assigned exactly once per life: after
    :meth:`engine_lost` the requests of that engine are queued again, at the head.

    A decision costs O(log engines) (``bench/bench_scheduler.py``); memory is that of the engines and
    the unfinished requests. ``balance`` other than ``paper`` is for comparison.
    ``network_tokens_per_s`` is what a compute NIC moves, for splits and ``aware``, which also looks at
    ``memory_tokens_per_s``, what a node's memory does; infinite where they don't matter.
    """

    def __init__(
        self,
        limits: Limits,
        path: PathPolicy = "auto",
        *,
        block_tokens: int = 64,
        balance: Balance = "paper",
        network_tokens_per_s: float = math.inf,
        memory_tokens_per_s: float = math.inf,
    ) -> None:
        if path not in ("pe", "de", "auto", "split"):
            raise InvalidArgument(f"path must be pe, de, auto or split, got {path!r}")
        if balance not in PREFILL_POLICIES:
            raise InvalidArgument(f"balance must be of {', '.join(PREFILL_POLICIES)}: {balance!r}")
        self.limits = limits
        self.path: PathPolicy = path
        self.block_tokens = block_tokens
        self.speeds = Speeds(network_tokens_per_s, memory_tokens_per_s)
        self._now_s = 0.0
        self._pe: dict[str, _Engine] = {}
        self._de: dict[str, _Engine] = {}
        self._disks: dict[str, Disk] = {}
        self._pe_on_node: dict[str, list[_Engine]] = {}
        self._groups_on_node: dict[str, dict[str, None]] = {}
        self._crowded: set[str] = set()  # nodes whose disk queue is above alpha
        self._prefill: PrefillEngines = PREFILL_POLICIES[balance](limits)
        self._decode: DecodeGroups = DecodeBaseline(balance)
        if balance in ("paper", "aware"):
            self._decode = DecodeGroups() if balance == "paper" else AwareDecode()
        self._takes_turns = balance == "round_robin"
        self._aware = balance == "aware"
        self._turn = False  # of the PE, the last time
        self._prefill_queue: deque[Request] = deque()
        self._decode_queue: deque[Request] = deque()
        self._dirty: dict[str, None] = {}  # groups that may be able to take what waits there
        self._placements: dict[int, _Placement] = {}
        self._complete: list[_Placement] = []
        self._serial = 0
        self._waiting = 0

    # ------------------------------------------------------------------ what happened

    def add_prefill(self, report: EngineReport) -> None:
        engine = self._pe[report.engine] = self._new_engine(report)
        self._pe_on_node.setdefault(report.node, []).append(engine)
        self._prefill.changed(engine.load)

    def add_decode(self, report: EngineReport) -> None:
        engine = self._de[report.engine] = self._new_engine(report)
        self._groups_on_node.setdefault(report.node, {})[report.group] = None
        self._decode.add(report.group, engine.load)
        if self._decode.groups[report.group].queue:
            self._dirty[report.group] = None

    def report(self, report: EngineReport, seen_requests: frozenset[int] = frozenset()) -> None:
        """Newer numbers of an engine. ``seen_requests`` are the assignments it had received when it
        counted; they are in the numbers now."""
        engine = self._pe.get(report.engine) or self._de.get(report.engine)
        if engine is None:
            raise InvalidArgument(f"report of unknown engine {report.engine}")
        engine.report = report
        for request_id in seen_requests & engine.unreported.keys():
            engine.forget(request_id)
        before = engine.load.unfinished_tokens
        engine.recount()
        disk = engine.load.disk
        _disk_reported(disk, report)
        self._engine_changed(engine, before)

    def submit(self, request: Request) -> None:
        if request.request_id in self._placements:
            raise InvalidArgument(f"request {request.request_id} was submitted before")
        self._serial += 1
        self._placements[request.request_id] = _Placement(request, self._serial)
        self._waiting += 1
        self._prefill_queue.append(request)
        self._decode_queue.append(request)

    def finish(self, request_id: int) -> None:
        """The request is over, served or given up; wherever it waits it is forgotten."""
        placement = self._placements.pop(request_id, None)
        if placement is not None:
            self._withdraw(placement)
            self._waiting -= 1

    def engine_lost(self, name: str) -> list[Request]:
        """Forgets an engine. Its unfinished requests are queued again and returned."""
        orphans: list[Request] = []
        if name in self._pe:
            engine = self._pe.pop(name)
            self._prefill.remove(name)
            self._pe_on_node[engine.node].remove(engine)
        elif name in self._de:
            engine = self._de.pop(name)
            orphans = self._decode.remove(engine.group, name)
        else:
            return []
        hit = [p for p in self._placements.values() if engine in (p.prefill, p.decode)]
        for placement in reversed(hit):
            self._requeue(placement)
        self._decode_queue.extendleft(reversed(orphans))
        return [p.request for p in hit]

    def requeue(self, request_id: int) -> None:
        """Puts a request back that its engines gave up."""
        placement = self._placements.get(request_id)
        if placement is not None:
            self._requeue(placement)

    # ------------------------------------------------------------------ fetches

    def fetch(self, now_s: float = 0.0) -> list[Assignment]:
        """Everything that can be assigned now, in order of submission. ``now_s`` is of the clock that
        the reports' ``at_s`` are of."""
        self._now_s = now_s
        while self._prefill_queue:
            load = self._prefill.assign(self._prefill_queue[0])
            if load is None:
                break
            self._placed(self._prefill_queue.popleft(), prefill=self._pe[load.engine])
        while self._decode_queue:
            group = self._decode.place(self._decode_queue[0])
            if group is None:
                break
            self._decode_queue.popleft()
            self._dirty[group.name] = None
        dirty, self._dirty = self._dirty, {}
        for name in dirty:
            waiting = self._decode.groups.get(name)
            if waiting is not None and waiting.queue:
                for request, load in self._decode.assign(waiting):
                    self._placed(request, decode=self._de[load.engine])
        complete, self._complete = self._complete, []
        complete.sort(key=lambda placement: placement.serial)
        return [self._assign(placement) for placement in complete]

    @property
    def engines(self) -> tuple[list[str], list[str]]:
        """Names of the prefill and the decode engines."""
        return list(self._pe), list(self._de)

    @property
    def waiting(self) -> int:
        """Requests that lack an engine."""
        return self._waiting

    # ------------------------------------------------------------------ inside

    def _new_engine(self, report: EngineReport) -> _Engine:
        disk = self._disks.setdefault(report.node, Disk())
        _disk_reported(disk, report)
        self._disk_changed(report.node, disk)
        engine = _Engine(report.group, report.node, report, EngineLoad(report.engine, disk=disk))
        engine.recount()
        return engine

    def _engine_changed(self, engine: _Engine, tokens_before: int) -> None:
        name = engine.load.engine
        if name in self._pe:
            self._prefill.changed(engine.load)
        elif name in self._de:
            self._decode.changed(engine.group, engine.load.unfinished_tokens - tokens_before)
            if self._decode.groups[engine.group].queue:
                self._dirty[engine.group] = None
        self._disk_changed(engine.node, engine.load.disk)

    def _disk_changed(self, node: str, disk: Disk) -> None:
        """Its queue got longer or shorter; the node's engines care when it passes alpha."""
        crowded = disk.queue_tokens > self.limits.alpha
        if self._decode.watches_disks:
            for group in self._groups_on_node.get(node, ()):
                if group in self._decode.groups:
                    self._decode.changed(group, 0)
        if crowded == (node in self._crowded):
            return
        (self._crowded.add if crowded else self._crowded.discard)(node)
        for engine in self._pe_on_node.get(node, ()):
            self._prefill.changed(engine.load)

    def _placed(
        self, request: Request, prefill: _Engine | None = None, decode: _Engine | None = None
    ) -> None:
        placement = self._placements[request.request_id]
        placement.prefill = prefill or placement.prefill
        placement.decode = decode or placement.decode
        for engine in (prefill, decode):
            if engine is not None:
                engine.unreported[request.request_id] = (request, 0)
        if placement.prefill is not None and placement.decode is not None:
            self._complete.append(placement)
            self._waiting -= 1

    def _withdraw(self, placement: _Placement) -> None:
        """Takes a request out of every queue and account; it lacks its engines then."""
        request = placement.request
        self._waiting += placement.prefill is not None and placement.decode is not None
        if placement.prefill is None and request in self._prefill_queue:
            self._prefill_queue.remove(request)
        if placement.decode is None:
            if request in self._decode_queue:
                self._decode_queue.remove(request)
            else:
                self._decode.withdraw(request)
        if not placement.assigned and placement in self._complete:
            self._complete.remove(placement)
        for engine in (placement.prefill, placement.decode):
            if engine is not None and request.request_id in engine.unreported:
                engine.forget(request.request_id)
                before = engine.load.unfinished_tokens
                engine.recount()
                self._engine_changed(engine, before)
        placement.prefill = placement.decode = None
        placement.assigned = False

    def _requeue(self, placement: _Placement) -> None:
        self._withdraw(placement)
        self._prefill_queue.appendleft(placement.request)
        self._decode_queue.appendleft(placement.request)

    def _assign(self, placement: _Placement) -> Assignment:
        request, prefill, decode = placement.request, placement.prefill, placement.decode
        assert prefill is not None
        assert decode is not None
        placement.assigned = True
        hit = request.cached_tokens
        path, on_decode = self._choose_path(hit, prefill.load, decode.load)
        for engine, reads in ((prefill, hit - on_decode), (decode, on_decode)):
            if reads:
                self._add_reads(engine, request, reads)
        return Assignment(request, prefill.load.engine, decode.load.engine, path, on_decode)

    def _choose_path(
        self, hit: int, prefill: EngineLoad, decode: EngineLoad
    ) -> tuple[ReadPath, int]:
        """The read path, and the hit tokens that the DE reads."""
        if self.path == "split" and hit:
            disks = prefill.disk, decode.disk
            if self._aware:
                disks = aged(disks[0], self._now_s), aged(disks[1], self._now_s)
            tokens = split_decode_tokens(hit, self.block_tokens, *disks, self.speeds.network)
            if 0 < tokens < hit:
                return "split", tokens
            return ("de" if tokens else "pe"), tokens
        side: Literal["pe", "de"]
        if self.path in ("pe", "de"):
            side = "pe" if self.path == "pe" else "de"
        elif self._takes_turns:
            self._turn = not self._turn
            side = "pe" if self._turn else "de"
        elif self._aware:
            side = quicker_side(hit, prefill, decode, self.speeds, self._now_s)
        else:
            side = choose_side(prefill.disk, decode.disk)
        return side, 0 if side == "pe" else hit

    def _add_reads(self, engine: _Engine, request: Request, reads: int) -> None:
        disk = engine.load.disk
        disk.total_tokens += reads
        if request.request_id in engine.unreported:
            engine.unreported[request.request_id] = (request, reads)
            disk.unreported_tokens += reads
            self._disk_changed(engine.node, disk)


def _disk_reported(disk: Disk, report: EngineReport) -> None:
    disk.reported_tokens = report.read_queue_tokens
    disk.tokens_per_s = report.read_tokens_per_s or disk.tokens_per_s
    disk.reported_at_s = report.at_s
    disk.memory_tokens = report.memory_tokens
