"""Decode-engine scheduling in two phases (paper section 6.1): across groups, then inside one."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from kvtransfer.scheduler.types import EngineReport, Request

__all__ = ["assign_decode", "balance_bound", "drain_global_queue"]

HEADROOM = 1.05


def drain_global_queue(
    queue: deque[Request],
    groups: Mapping[str, Sequence[EngineReport]],
    private: Mapping[str, deque[Request]],
) -> None:
    """Phase 1: moves the whole global queue to the groups' private queues.

    Each request goes to the group with the smallest sum of tok_e, counting what already waits in
    its private queue. Without any group the queue stays.
    """
    if not groups:
        return
    load = {
        name: sum(e.unfinished_tokens for e in engines) + sum(r.num_tokens for r in private[name])
        for name, engines in groups.items()
    }
    while queue:
        request = queue.popleft()
        name = min(load, key=lambda g: (load[g], g))
        private[name].append(request)
        load[name] += request.num_tokens


def balance_bound(queue: Sequence[Request], engines: Sequence[EngineReport]) -> float:
    """Z: 1.05 times the tokens each engine would hold if R and the present load were spread evenly.

    R is the prefix of the queue that fits the group's total free memory, were it not fragmented.
    """
    free = sum(e.free_tokens for e in engines)
    reachable = 0
    for request in queue:
        if request.num_tokens + request.num_generate > free:
            break
        free -= request.num_tokens + request.num_generate
        reachable += request.num_tokens
    present = sum(e.unfinished_tokens for e in engines)
    return HEADROOM * (reachable + present) / len(engines)


def assign_decode(
    queue: deque[Request], engines: Sequence[EngineReport]
) -> list[tuple[Request, str]]:
    """Phase 2: assigns from the head of a group's private queue (which it consumes).

    Among engines with room, those that stay within Z are preferred, there the least seq_e; if none
    stays within Z, the least tok_e. When no engine has room for the head, the fetch ends.
    """
    if not engines:
        return []
    bound = balance_bound(queue, engines)
    state = {e.engine: e for e in engines}
    assigned: list[tuple[Request, str]] = []
    while queue:
        request = queue[0]
        needed = request.num_tokens + request.num_generate
        roomy = [e for e in state.values() if e.free_tokens >= needed]
        if not roomy:
            break
        balanced = [e for e in roomy if e.unfinished_tokens + request.num_tokens <= bound]
        if balanced:
            chosen = min(balanced, key=lambda e: (e.unfinished_requests, e.engine))
        else:
            chosen = min(roomy, key=lambda e: (e.unfinished_tokens, e.engine))
        queue.popleft()
        state[chosen.engine] = chosen.with_request(request)
        assigned.append((request, chosen.engine))
    return assigned
