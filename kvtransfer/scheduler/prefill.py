"""Prefill-engine scheduling: one FIFO queue, three categories (paper section 6.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvtransfer.scheduler.types import EngineReport, Limits, Request

__all__ = ["assign_prefill", "pick_prefill"]


def pick_prefill(engines: Sequence[EngineReport], limits: Limits) -> EngineReport | None:
    """The engine for the head request, or None when every engine is overloaded.

    C1 (tok_e > beta) never takes work. C2 (short disk queue) goes before C3 (long disk queue);
    inside a category the least tok_e wins, ties by name.
    """
    open_engines = [e for e in engines if e.unfinished_tokens <= limits.beta]
    short = [e for e in open_engines if e.read_queue_tokens <= limits.alpha]
    candidates = short or open_engines
    return min(candidates, key=lambda e: (e.unfinished_tokens, e.engine), default=None)


def assign_prefill(
    queue: deque[Request], engines: Sequence[EngineReport], limits: Limits
) -> list[tuple[Request, str]]:
    """Assigns from the head of ``queue`` (which it consumes) until every engine is in C1.

    The categories are re-evaluated after each assignment, or tok_e could run past beta by more
    than one request.
    """
    state = {e.engine: e for e in engines}
    assigned: list[tuple[Request, str]] = []
    while queue:
        chosen = pick_prefill(list(state.values()), limits)
        if chosen is None:
            break
        request = queue.popleft()
        state[chosen.engine] = chosen.with_request(request)
        assigned.append((request, chosen.engine))
    return assigned
