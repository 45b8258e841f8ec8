"""The KV of one sequence as the two kinds of engine hold it (see models.runner.KVSequence)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from kvtransfer.models import Arena, ArenaSpan
from kvtransfer.stream import LayerStream

__all__ = ["ResidentSequence", "StreamedSequence"]


@dataclass
class ResidentSequence:
    """All layers on the device: decode, and the reference run."""

    arena: Arena
    span: ArenaSpan

    def store(self, layer: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.arena.write(layer, self.span, first, keys, values)

    def view(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.arena.view(layer, self.span, length)

    def attended(self, layer: int) -> None:
        pass


@dataclass
class StreamedSequence:
    """Layers pass through the arena's few slots: loaded, computed, published, released.

    ``ready`` counts what was staged of a layer, ``computed`` lets its push start, ``released``
    counts (push done, attention done): at two, the slot may take layer + num_slots.
    """

    arena: Arena
    span: ArenaSpan
    ready: LayerStream
    computed: LayerStream
    released: LayerStream
    deadline: float  # time.monotonic()
    # (begin, end) ns of each layer's waiting; what lies between two of them is compute.
    waits: list[tuple[int, int]] = field(default_factory=list)

    def store(self, layer: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        begin = time.monotonic_ns()
        slot = layer % self.arena.num_slots
        if layer >= self.arena.num_slots:
            self.released.wait(layer - self.arena.num_slots, self._left())
        self.arena.write(slot, self.span, first, keys, values)
        self.ready.wait(layer, self._left())
        self.computed.publish(layer)
        self.waits.append((begin, time.monotonic_ns()))

    def view(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.arena.view(layer % self.arena.num_slots, self.span, length)

    def attended(self, layer: int) -> None:
        self.released.publish(layer)

    def _left(self) -> float:
        return self.deadline - time.monotonic()
