"""Decode GPUs: continuous batching as a clock that counts steps."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvtransfer.sim.config import SimConfig, weights_per_gpu
from kvtransfer.sim.node import Gpu, Node
from kvtransfer.sim.turn import Turn

__all__ = ["DecodeGpu", "decode_read_bytes"]


def decode_read_bytes(config: SimConfig, context: float) -> float:
    """KV bytes that one sequence's decode step reads: what is selected of a context and its index.

    Or all of it, in bytes that take as long as those do: what lies together is read faster.
    """
    cost = config.cost
    if not cost.selected_tokens:
        hardware = config.hardware
        weight = hardware.decode_utilisation / hardware.dense_utilisation
        return context * cost.kv_bytes_per_token * weight
    selected = min(context, cost.selected_tokens) * cost.kv_bytes_per_token
    return selected + context * cost.index_bytes_per_token


class DecodeGpu(Gpu):
    """Every sequence gets a token per step; a step takes what reading the weights and the sequences'
    KV takes, and a fixed time. Between two arrivals or departures all steps are equally long, so a
    sequence's end is a number of steps away."""

    def __init__(self, node: Node, name: str, config: SimConfig) -> None:
        super().__init__(node, name, config.hardware)
        self.config = config
        hardware = config.hardware
        self._weights = weights_per_gpu(config, config.decode)
        free = hardware.hbm_bytes * (1 - hardware.hbm_reserve) - self._weights
        self.free_tokens = int(free / node.kv_bytes)
        self.capacity = self.free_tokens
        self._bandwidth = hardware.hbm_bytes_per_s * hardware.decode_utilisation
        self._overhead = hardware.step_overhead_s
        self.on_done: Callable[[Turn], None]
        self._kv_bytes = 0.0
        self._ends: list[tuple[float, int, Turn, float]] = []  # (step, order, turn, its KV bytes)
        self._order = 0
        self._steps = 0.0
        self._step_s = 0.0
        self._settled = 0.0
        self._version = 0

    def add(self, turn: Turn) -> None:
        """The turn's KV is on the device; its first token came from the prefill."""
        self._settle()
        if turn.generate <= 1:
            self.kernel.after(0.0, self.on_done, turn)
            return
        read = decode_read_bytes(self.config, turn.context + turn.generate / 2)
        self._kv_bytes += read
        self._order += 1
        end = self._steps + turn.generate - 1
        heapq.heappush(self._ends, (end, self._order, turn, read))
        self._change()

    def _settle(self) -> None:
        now = self.kernel.now
        if self._ends:
            self._steps += (now - self._settled) / self._step_s
        self._settled = now

    def _change(self) -> None:
        """The batch is another: so is the time of a step, and of the next end."""
        self._version += 1
        if not self._ends:
            self._kv_bytes = 0.0
            return
        self._step_s = self._overhead + (self._weights + self._kv_bytes) / self._bandwidth
        seconds = max(self._ends[0][0] - self._steps, 0.0) * self._step_s
        self.kernel.after(seconds, self._end, self._version)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._settle()
        self._steps = max(self._steps, self._ends[0][0])
        limit = self._steps + 1e-9
        over = []
        while self._ends and self._ends[0][0] <= limit:
            _, _, turn, read = heapq.heappop(self._ends)
            self._kv_bytes -= read
            over.append(turn)
        self._change()
        for turn in over:
            self.on_done(turn)
