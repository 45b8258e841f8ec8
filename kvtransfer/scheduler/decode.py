"""Decode-engine scheduling in two phases (paper section 6.1): across groups, then inside one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvtransfer.scheduler.order import Order
from kvtransfer.scheduler.types import EngineLoad, Request

__all__ = ["DecodeGroup", "DecodeGroups", "assign_decode", "balance_bound"]

HEADROOM = 1.05


class DecodeGroup:
    """Engines that fetch together, and the requests that wait for one of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engines: dict[str, EngineLoad] = {}
        self.queue: deque[Request] = deque()
        self.load = 0  # sum of tok_e, and what already waits


class DecodeGroups:
    """Phase 1: each request goes to the group with the smallest load, ties by name."""

    watches_disks = False  # whether a group's place depends on its disks' queues

    def __init__(self) -> None:
        self.groups: dict[str, DecodeGroup] = {}
        self._order = Order()

    def key(self, group: DecodeGroup) -> float:
        """The group with the least is next."""
        return group.load

    def add(self, group: str, engine: EngineLoad) -> None:
        found = self.groups.setdefault(group, DecodeGroup(group))
        found.engines[engine.engine] = engine
        self.changed(group, engine.unfinished_tokens)

    def remove(self, group: str, engine: str) -> list[Request]:
        """Returns the waiting requests of a group that has lost its last engine."""
        found = self.groups[group]
        gone = found.engines.pop(engine)
        if found.engines:
            self.changed(group, -gone.unfinished_tokens)
            return []
        self._order.discard(group)
        del self.groups[group]
        return list(found.queue)

    def changed(self, group: str, tokens: int) -> None:
        """Its load is by so many tokens another than before."""
        found = self.groups[group]
        found.load += tokens
        self._order.set(group, (self.key(found),))

    def place(self, request: Request) -> DecodeGroup | None:
        """Queues ``request`` at a group; None without any."""
        first = self._order.first()
        if first is None:
            return None
        group = self.groups[first[1]]
        group.queue.append(request)
        self.changed(group.name, request.num_tokens)
        return group

    def withdraw(self, request: Request) -> None:
        for group in self.groups.values():
            if request in group.queue:
                group.queue.remove(request)
                self.changed(group.name, -request.num_tokens)

    def assign(self, group: DecodeGroup) -> list[tuple[Request, EngineLoad]]:
        """Phase 2 of one group. Its load stays: what waited there is with its engines now."""
        return assign_decode(group.queue, list(group.engines.values()))


def balance_bound(
    queue: Sequence[Request] | deque[Request], engines: Sequence[EngineLoad]
) -> float:
    """Z: 1.05 times the tokens each engine would hold if R and the present load were spread evenly.

    R is the prefix of the queue that fits the group's total free memory, were it not fragmented.
    """
    free = sum(e.free_tokens for e in engines)
    reachable = 0
    for request in queue:
        if request.peak_tokens > free:
            break
        free -= request.peak_tokens
        reachable += request.num_tokens
    present = sum(e.unfinished_tokens for e in engines)
    return HEADROOM * (reachable + present) / len(engines)


def assign_decode(
    queue: deque[Request], engines: Sequence[EngineLoad]
) -> list[tuple[Request, EngineLoad]]:
    """Phase 2: assigns from the head of a group's private queue; consumes it and loads the engines.

    Among engines with room, those that stay within Z are preferred, there the least seq_e; if none
    stays within Z, the least tok_e. When no engine has room for the head, the fetch ends.
    """
    assigned: list[tuple[Request, EngineLoad]] = []
    bound: float | None = None
    while queue and engines:
        request = queue[0]
        roomy = [e for e in engines if e.free_tokens >= request.peak_tokens]
        if not roomy:
            break
        if bound is None:
            bound = balance_bound(queue, engines)
        within = bound - request.num_tokens
        balanced = [e for e in roomy if e.unfinished_tokens <= within]
        if balanced:
            chosen = min(balanced, key=lambda e: (e.unfinished_requests, e.engine))
        else:
            chosen = min(roomy, key=lambda e: (e.unfinished_tokens, e.engine))
        queue.popleft()
        chosen.take(request)
        assigned.append((request, chosen))
    return assigned
