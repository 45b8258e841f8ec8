"""The request scheduler: which (PE, DE) pair and which read path, as one deterministic object.

It is told what happened (submit, report, fetch, finish, lost) and answers with assignments. The live
scheduler process and the simulator drive the same object.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal

from kvtransfer.errors import InvalidArgument
from kvtransfer.scheduler.decode import assign_decode, drain_global_queue
from kvtransfer.scheduler.prefill import assign_prefill
from kvtransfer.scheduler.read_path import choose_read_path
from kvtransfer.scheduler.types import Assignment, EngineReport, Limits, ReadPath, Request

__all__ = ["PathPolicy", "Scheduler"]

PathPolicy = Literal["pe", "de", "auto"]


@dataclass
class _Engine:
    report: EngineReport
    # Assigned here, and in no report of the engine yet: the request and the hit tokens it will read.
    unreported: dict[int, tuple[Request, int]] = field(default_factory=dict)
    total_reads: int = 0

    def seen(self) -> EngineReport:
        """The report as it will read once everything assigned has arrived."""
        report = self.report
        for request, reads in self.unreported.values():
            report = report.with_request(request)
            report = replace(report, read_queue_tokens=report.read_queue_tokens + reads)
        return report


@dataclass
class _Placement:
    request: Request
    prefill: str | None = None
    decode: str | None = None
    assigned: bool = False  # its engines have been told


class Scheduler:
    """Not thread-safe. Every request submitted is assigned exactly once per life: after
    :meth:`engine_lost` the requests of that engine are queued again, at the head."""

    def __init__(self, limits: Limits, path: PathPolicy = "auto") -> None:
        if path not in ("pe", "de", "auto"):
            raise InvalidArgument(f"path must be pe, de or auto, got {path!r}")
        self.limits = limits
        self.path: PathPolicy = path
        self._prefill: dict[str, _Engine] = {}
        self._decode: dict[str, _Engine] = {}
        self._prefill_queue: deque[Request] = deque()
        self._decode_queue: deque[Request] = deque()
        self._private: dict[str, deque[Request]] = {}
        self._placements: dict[int, _Placement] = {}

    # ------------------------------------------------------------------ what happened

    def add_prefill(self, report: EngineReport) -> None:
        self._prefill[report.engine] = _Engine(report)

    def add_decode(self, report: EngineReport) -> None:
        self._decode[report.engine] = _Engine(report)
        self._private.setdefault(report.group, deque())

    def report(self, report: EngineReport, seen_requests: frozenset[int] = frozenset()) -> None:
        """Newer numbers of an engine. ``seen_requests`` are the assignments it had received when it
        counted; they are in the numbers now."""
        engine = self._prefill.get(report.engine) or self._decode.get(report.engine)
        if engine is None:
            raise InvalidArgument(f"report of unknown engine {report.engine}")
        engine.report = report
        for request_id in seen_requests & engine.unreported.keys():
            del engine.unreported[request_id]

    def submit(self, request: Request) -> None:
        if request.request_id in self._placements:
            raise InvalidArgument(f"request {request.request_id} was submitted before")
        self._placements[request.request_id] = _Placement(request)
        self._prefill_queue.append(request)
        self._decode_queue.append(request)

    def finish(self, request_id: int) -> None:
        """The request is over, served or given up; wherever it waits it is forgotten."""
        placement = self._placements.pop(request_id, None)
        if placement is not None:
            self._unqueue(placement.request)
        for engine in (*self._prefill.values(), *self._decode.values()):
            engine.unreported.pop(request_id, None)

    def engine_lost(self, name: str) -> list[Request]:
        """Forgets an engine. Its unfinished requests are queued again and returned."""
        self._prefill.pop(name, None)
        lost = self._decode.pop(name, None)
        hit = [p for p in self._placements.values() if name in (p.prefill, p.decode)]
        for placement in reversed(hit):
            self._requeue(placement)
        if lost and not any(e.report.group == lost.report.group for e in self._decode.values()):
            orphans = self._private.pop(lost.report.group)
            self._decode_queue.extendleft(reversed(orphans))
        return [p.request for p in hit]

    def requeue(self, request_id: int) -> None:
        """Puts a request back that its engines gave up."""
        placement = self._placements.get(request_id)
        if placement is not None:
            self._requeue(placement)

    # ------------------------------------------------------------------ fetches

    def fetch(self) -> list[Assignment]:
        """Everything that can be assigned now, in order of submission."""
        for request, name in assign_prefill(
            self._prefill_queue, [e.seen() for e in self._prefill.values()], self.limits
        ):
            self._placements[request.request_id].prefill = name
            self._prefill[name].unreported[request.request_id] = (request, 0)
        groups: dict[str, list[EngineReport]] = {}
        for engine in self._decode.values():
            groups.setdefault(engine.report.group, []).append(engine.seen())
        drain_global_queue(self._decode_queue, groups, self._private)
        for group, engines in groups.items():
            for request, name in assign_decode(self._private[group], engines):
                self._placements[request.request_id].decode = name
                self._decode[name].unreported[request.request_id] = (request, 0)
        complete = [p for p in self._placements.values() if p.prefill and p.decode]
        return [self._assign(p) for p in complete if not p.assigned]

    @property
    def engines(self) -> tuple[list[str], list[str]]:
        """Names of the prefill and the decode engines."""
        return list(self._prefill), list(self._decode)

    @property
    def waiting(self) -> int:
        """Requests that lack an engine."""
        return sum(1 for p in self._placements.values() if p.prefill is None or p.decode is None)

    # ------------------------------------------------------------------ inside

    def _unqueue(self, request: Request) -> None:
        for queue in (self._prefill_queue, self._decode_queue, *self._private.values()):
            if request in queue:
                queue.remove(request)

    def _requeue(self, placement: _Placement) -> None:
        request = placement.request
        self._unqueue(request)
        for engine in (*self._prefill.values(), *self._decode.values()):
            engine.unreported.pop(request.request_id, None)
        placement.prefill = placement.decode = None
        placement.assigned = False
        self._prefill_queue.appendleft(request)
        self._decode_queue.appendleft(request)

    def _assign(self, placement: _Placement) -> Assignment:
        assert placement.prefill is not None
        assert placement.decode is not None
        prefill, decode = self._prefill[placement.prefill], self._decode[placement.decode]
        path: ReadPath
        if self.path == "auto":
            path = choose_read_path(
                prefill.seen().read_queue_tokens,
                decode.seen().read_queue_tokens,
                prefill.total_reads,
                decode.total_reads,
            )
        else:
            path = self.path
        placement.assigned = True
        reader = prefill if path == "pe" else decode
        request = placement.request
        if request.request_id in reader.unreported:
            reader.unreported[request.request_id] = (request, request.cached_tokens)
        reader.total_reads += request.cached_tokens
        return Assignment(request, placement.prefill, placement.decode, path)
