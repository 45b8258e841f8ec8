"""Prefill-engine scheduling: one FIFO queue, three categories (paper section 6.1)."""

from __future__ import annotations

from kvtransfer.scheduler.order import Order
from kvtransfer.scheduler.types import EngineLoad, Limits, Request

__all__ = ["PrefillEngines"]

OVERLOADED = 2  # C1


class PrefillEngines:
    """Who takes the request at the head of the queue.

    C1 (tok_e > beta) never takes work. C2 (short disk queue) goes before C3 (long disk queue); inside
    a category the least tok_e wins, ties by name. The categories are re-evaluated after each
    assignment, or tok_e could run past beta by more than one request.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._engines: dict[str, EngineLoad] = {}
        self._order = Order()

    def category(self, engine: EngineLoad) -> int:
        if engine.unfinished_tokens > self._limits.beta:
            return OVERLOADED
        return int(engine.disk.queue_tokens > self._limits.alpha)

    def changed(self, engine: EngineLoad) -> None:
        """It is new, or its load or its disk's queue is another than before."""
        self._engines[engine.engine] = engine
        self._order.set(engine.engine, (self.category(engine), engine.unfinished_tokens))

    def remove(self, name: str) -> None:
        self._engines.pop(name, None)
        self._order.discard(name)

    def assign(self, request: Request) -> EngineLoad | None:
        """Gives ``request`` to an engine; None when all are overloaded."""
        first = self._order.first()
        if first is None or first[0][0] == OVERLOADED:
            return None
        engine = self._engines[first[1]]
        engine.take(request)
        self.changed(engine)
        return engine
