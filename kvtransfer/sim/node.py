"""Nodes: their NICs and memory as fluid resources, and each engine's queue of storage reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvtransfer.scheduler import EngineReport
from kvtransfer.sim.config import Hardware
from kvtransfer.sim.kernel import Kernel
from kvtransfer.sim.turn import Turn

__all__ = ["Gpu", "Node"]


class Node:
    """One storage NIC and one memory for ``gpus_per_node`` engines.

    Storage reads are FIFO per engine, whole prefixes, as the engines' queues are; the heads of the
    engines' queues share the storage NIC. ``windows`` counts the bytes read per window.
    """

    def __init__(self, kernel: Kernel, name: str, hardware: Hardware, kv_bytes: int) -> None:
        self.kernel, self.name = kernel, name
        self.kv_bytes = kv_bytes
        rate = hardware.snic_bytes_per_s * hardware.storage_efficiency
        self.snic = kernel.fluid.add_resource(rate)
        self.dram = kernel.fluid.add_resource(hardware.dram_bytes_per_s)
        self.storage_uses = [(self.snic, 1.0), (self.dram, 1.0)]
        self.read_tokens_per_s = rate / kv_bytes
        self.queued_tokens = 0  # assigned to its disk and not read yet
        self.memory_tokens = 0  # still to pass through its memory
        self.free_tokens = int(hardware.host_bytes / kv_bytes)  # of its engines' buffers
        self.read_tokens = 0
        self.waiting: deque[tuple[int, Callable[[Turn], None], Turn]] = deque()

    def reserve(self, tokens: int, ready: Callable[[Turn], None], turn: Turn) -> None:
        """Calls ``ready`` once the buffers have room for so many tokens, in the order asked."""
        self.waiting.append((tokens, ready, turn))
        self._admit()

    def release(self, tokens: int) -> None:
        self.free_tokens += tokens
        self._admit()

    def _admit(self) -> None:
        while self.waiting and self.waiting[0][0] <= self.free_tokens:
            tokens, ready, turn = self.waiting.popleft()
            self.free_tokens -= tokens
            ready(turn)


class Gpu:
    """What a prefill and a decode GPU have in common: a compute NIC and a queue of storage reads."""

    def __init__(self, node: Node, name: str, hardware: Hardware) -> None:
        self.node, self.name = node, name
        self.kernel = node.kernel
        self.cnic_read = self.kernel.fluid.add_resource(hardware.cnic_bytes_per_s)
        self.cnic_write = self.kernel.fluid.add_resource(hardware.cnic_bytes_per_s)
        self.reads: deque[tuple[int, Turn]] = deque()
        self.on_loaded: Callable[[Gpu, Turn], None]
        # What it tells the scheduler.
        self.unfinished_requests = 0
        self.unfinished_tokens = 0
        self.free_tokens = 0
        self.network_tokens = 0  # still to pass through its NIC
        self.unreported: list[int] = []

    def load(self, turn: Turn, tokens: int) -> None:
        """Reads ``tokens`` of a turn's prefix from storage, after what was asked for before."""
        self.reads.append((tokens, turn))
        if len(self.reads) == 1:
            self._read_next()

    def _read_next(self) -> None:
        tokens, _ = self.reads[0]
        self.kernel.flow(tokens * self.node.kv_bytes, self.node.storage_uses, self._read)

    def _read(self) -> None:
        tokens, turn = self.reads.popleft()
        self.node.queued_tokens -= tokens
        self.node.read_tokens += tokens
        if self.reads:
            self._read_next()
        self.on_loaded(self, turn)

    def report(self) -> tuple[EngineReport, frozenset[int]]:
        seen = frozenset(self.unreported)
        self.unreported.clear()
        report = EngineReport(
            self.name,
            self.node.name,
            self.node.name,
            self.unfinished_requests,
            self.unfinished_tokens,
            self.node.queued_tokens,
            self.free_tokens,
            self.node.read_tokens_per_s,
            self.network_tokens,
            self.node.memory_tokens,
            self.kernel.now,
        )
        return report, seen
