"""The scheduler while engines join, leave and die: simulated, with faults from a seed.

Nothing may be lost, doubled or starved; what an engine says after its death is refused.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.errors import InvalidArgument
from kvtransfer.scheduler import Assignment, EngineReport, Limits, PathPolicy, Request, Scheduler

SERVICE_S = 1.0  # mean time of a request on its engines
GPUS = 2


@dataclass
class Churn:
    """Engines in groups of two; each comes with a new name (its epoch) and may die at any time."""

    path: PathPolicy
    seed: int
    scheduler: Scheduler = field(init=False)
    clock: float = 0.0
    alive: dict[str, tuple[str, str]] = field(default_factory=dict)  # engine -> (kind, group)
    dead: list[str] = field(default_factory=list)
    running: dict[int, tuple[Assignment, float]] = field(default_factory=dict)
    submitted: dict[int, float] = field(default_factory=dict)
    first_assigned: dict[int, float] = field(default_factory=dict)
    finished: dict[int, float] = field(default_factory=dict)
    lives: dict[int, int] = field(default_factory=dict)
    events: list[tuple[float, int, str, int]] = field(default_factory=list)
    serial: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.scheduler = Scheduler(Limits(20_000, 40_000), self.path)

    def at(self, time: float, what: str, number: int = 0) -> None:
        self.serial += 1
        heapq.heappush(self.events, (time, self.serial, what, number))

    def report_of(self, name: str) -> EngineReport:
        _, group = self.alive[name]
        mine = [a.request for a, _ in self.running.values() if name in (a.prefill, a.decode)]
        tokens = sum(r.num_tokens for r in mine)
        peak = sum(r.peak_tokens for r in mine)
        return EngineReport(name, group, group, len(mine), tokens, tokens // 3, 60_000 - peak)

    def join(self, kind: str) -> None:
        self.serial += 1
        group = f"{kind}-{self.serial // GPUS % 5}"
        name = f"{kind}-{self.serial}"
        self.alive[name] = (kind, group)
        add = self.scheduler.add_prefill if kind == "pe" else self.scheduler.add_decode
        add(self.report_of(name))

    def die(self) -> None:
        """One engine, but never the last of its kind."""
        kinds = [kind for kind, _ in self.alive.values()]
        mortal = [n for n, (kind, _) in self.alive.items() if kinds.count(kind) > 1]
        if not mortal:
            return
        name = self.random.choice(sorted(mortal))
        del self.alive[name]
        self.dead.append(name)
        hit = {i for i, (a, _) in self.running.items() if name in (a.prefill, a.decode)}
        returned = {r.request_id for r in self.scheduler.engine_lost(name)}
        assert hit <= returned, "what ran there comes back"
        for number in hit:
            del self.running[number]

    def ghost(self) -> None:
        """A dead engine reports."""
        if self.dead:
            name = self.random.choice(self.dead)
            with pytest.raises(InvalidArgument, match="unknown engine"):
                self.scheduler.report(EngineReport(name, "g", "n"))
            assert self.scheduler.engine_lost(name) == [], "and it dies only once"

    def fetch(self) -> None:
        for assignment in self.scheduler.fetch():
            number = assignment.request.request_id
            assert number not in self.running
            assert number not in self.finished
            assert self.alive[assignment.prefill][0] == "pe"
            assert self.alive[assignment.decode][0] == "de"
            self.lives[number] = self.lives.get(number, 0) + 1
            self.first_assigned.setdefault(number, self.clock)
            end = self.clock + self.random.uniform(0.2, 1.8) * SERVICE_S
            self.running[number] = (assignment, end)
            self.at(end, "finish", number)

    def finish(self, number: int) -> None:
        if number not in self.running or self.running[number][1] != self.clock:
            return  # of an earlier life
        assignment, _ = self.running.pop(number)
        self.finished[number] = self.clock
        self.scheduler.finish(number)
        for name in (assignment.prefill, assignment.decode):
            self.scheduler.report(self.report_of(name), frozenset(self.running))

    def run(self, requests: int, faults: int, span_s: float) -> None:
        for kind in ("pe", "pe", "de", "de", "de"):
            self.join(kind)
        for number in range(requests):
            self.at(self.random.uniform(0, span_s), "submit", number)
        for _ in range(faults):
            self.at(self.random.uniform(0, span_s), self.random.choice(["die", "join", "ghost"]))
        while self.events:
            self.clock, _, what, number = heapq.heappop(self.events)
            if what == "submit":
                tokens = self.random.randint(100, 8000)
                self.submitted[number] = self.clock
                self.scheduler.submit(Request(number, tokens, tokens // 2, 50, number % 7))
            elif what == "finish":
                self.finish(number)
            elif what == "join":
                self.join(self.random.choice(["pe", "de"]))
            elif what == "die":
                self.die()
            else:
                self.ghost()
            for name in sorted(self.alive):
                self.scheduler.report(self.report_of(name), frozenset(self.running))
            self.fetch()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["pe", "auto", "split"]),
    st.integers(0, 10_000),
    st.integers(1, 120),
    st.integers(0, 40),
)
def test_every_request_ends_exactly_once_whatever_dies_and_joins(
    path: PathPolicy, seed: int, requests: int, faults: int
) -> None:
    churn = Churn(path, seed)
    churn.run(requests, faults, span_s=30.0)
    assert churn.finished.keys() == set(range(requests)), "none is lost"
    assert not churn.running
    assert churn.scheduler.waiting == 0
    assert churn.scheduler.fetch() == []
    if not churn.dead:
        assert set(churn.lives.values()) <= {1}, "without a death nobody lives twice"
    # Starvation: nobody waits much longer than those who came at the same time or later.
    for number, at in churn.submitted.items():
        later = [churn.first_assigned[n] for n, t in churn.submitted.items() if t >= at]
        assert churn.first_assigned[number] <= min(later) + 5 * SERVICE_S + 1e-9


def test_waiting_is_first_come_first_served_under_overload() -> None:
    """A third of the capacity that is needed: the queue grows, and its head is still the oldest."""
    churn = Churn("auto", 3)
    churn.run(600, 0, span_s=20.0)
    order = sorted(churn.submitted, key=lambda n: churn.submitted[n])
    assigned = [churn.first_assigned[n] for n in order]
    inversions = [a - b for a, b in pairwise(assigned) if a > b]
    assert max(inversions, default=0.0) <= 3 * SERVICE_S
    assert max(churn.finished.values()) > 25, "it was an overload"
