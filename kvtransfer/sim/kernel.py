"""The event loop: a heap of (time, sequence, call) and the fluid network's completions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

from kvtransfer._fluid import FluidNetwork

__all__ = ["Kernel"]

Call = Callable[..., None]


class Kernel:
    """Simulated time in seconds. What is due at the same time runs in the order it was scheduled,
    completions of flows first: the same calls give the same run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fluid = FluidNetwork()
        self.events = 0
        self._heap: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self._sequence = 0

    def at(self, time: float, call: Call, *arguments: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, call, arguments))

    def after(self, seconds: float, call: Call, *arguments: Any) -> None:
        self.at(self.now + seconds, call, *arguments)

    def flow(self, size: float, uses: list[tuple[int, float]], call: Call, *arguments: Any) -> int:
        """Starts a flow over resources (index, weight); ``call`` when it is through."""
        return self.fluid.start(self.now, size, uses, (call, arguments))

    def run(self, until: float = math.inf) -> None:
        """Until nothing is scheduled any more, or the next event lies behind ``until``."""
        heap, fluid = self._heap, self.fluid
        while True:
            flow_time = fluid.next_time()
            time = min(flow_time, heap[0][0]) if heap else flow_time
            if time > until or time == math.inf:
                return
            self.now = time
            self.events += 1
            if flow_time <= time:
                call, arguments = fluid.finished(time)  # type: ignore[misc]
            else:
                _, _, call, arguments = heapq.heappop(heap)
            call(*arguments)
