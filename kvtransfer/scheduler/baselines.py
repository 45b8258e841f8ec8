"""Other ways to choose engines, behind the same interface: what the paper's policy is compared with.

``round_robin`` takes the next engine, and the sides' disks in turn; ``least_tokens`` the engine with
the fewest unfinished tokens; ``affinity`` the one its session always had. None of these limits what a
prefill engine is given; a decode engine must have the memory.
"""

from __future__ import annotations

from typing import Literal

from kvtransfer.scheduler.decode import DecodeGroup, DecodeGroups
from kvtransfer.scheduler.prefill import PrefillEngines
from kvtransfer.scheduler.types import EngineLoad, Limits, Request

__all__ = ["PREFILL_POLICIES", "Balance", "DecodeBaseline"]

Balance = Literal["paper", "aware", "round_robin", "least_tokens", "affinity"]


class _LeastRecentlyPicked(PrefillEngines):
    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._serial = 0

    def changed(self, engine: EngineLoad) -> None:
        self._engines[engine.engine] = engine
        self._order.set(engine.engine, (0, engine.picked))

    def assign(self, request: Request) -> EngineLoad | None:
        chosen = super().assign(request)
        if chosen is not None:
            self._serial += 1
            chosen.picked = self._serial
            self.changed(chosen)
        return chosen


class _LeastTokens(PrefillEngines):
    def category(self, engine: EngineLoad) -> int:
        return 0


class _Affinity(PrefillEngines):
    def assign(self, request: Request) -> EngineLoad | None:
        if not self._engines:
            return None
        names = list(self._engines)
        engine = self._engines[names[request.session % len(names)]]
        engine.take(request)
        return engine


PREFILL_POLICIES: dict[str, type[PrefillEngines]] = {
    "paper": PrefillEngines,
    "aware": PrefillEngines,
    "round_robin": _LeastRecentlyPicked,
    "least_tokens": _LeastTokens,
    "affinity": _Affinity,
}


class DecodeBaseline(DecodeGroups):
    """Groups take turns; inside one the engine as ``balance`` says, of those with the memory."""

    def __init__(self, balance: str) -> None:
        super().__init__()
        self._balance = balance
        self._serial = 0
        self._turns: dict[str, int] = {}

    def changed(self, group: str, tokens: int) -> None:
        if self._balance == "least_tokens":
            super().changed(group, tokens)
        else:
            self._order.set(group, (self._turns.setdefault(group, 0),))

    def place(self, request: Request) -> DecodeGroup | None:
        if self._balance == "least_tokens" or not self.groups:
            return super().place(request)
        names = list(self.groups)
        first = self._order.first()
        assert first is not None
        name = names[request.session % len(names)] if self._balance == "affinity" else first[1]
        self._serial += 1
        self._turns[name] = self._serial
        self.changed(name, request.num_tokens)
        group = self.groups[name]
        group.queue.append(request)
        return group

    def assign(self, group: DecodeGroup) -> list[tuple[Request, EngineLoad]]:
        assigned = []
        while group.queue:
            request = group.queue[0]
            roomy = [e for e in group.engines.values() if e.free_tokens >= request.peak_tokens]
            if not roomy:
                break
            chosen = self._choose(request, roomy)
            self._serial += 1
            chosen.picked = self._serial
            group.queue.popleft()
            chosen.take(request)
            assigned.append((request, chosen))
        return assigned

    def _choose(self, request: Request, roomy: list[EngineLoad]) -> EngineLoad:
        if self._balance == "affinity":
            return roomy[request.session % len(roomy)]
        if self._balance == "least_tokens":
            return min(roomy, key=lambda e: (e.unfinished_tokens, e.engine))
        return min(roomy, key=lambda e: e.picked)
