"""Names in the order of a key that changes."""

from __future__ import annotations

import heapq
from typing import Any

__all__ = ["Order"]

Key = tuple[Any, ...]


class Order:
    """The least key first, ties by name. Setting a key and reading the first cost O(log n): a heap
    whose outdated entries are skipped, and dropped when they outnumber the others."""

    def __init__(self) -> None:
        self._keys: dict[str, Key] = {}
        self._heap: list[tuple[Key, str]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def set(self, name: str, key: Key) -> None:
        if self._keys.get(name) == key:
            return
        self._keys[name] = key
        if len(self._heap) > 4 * len(self._keys) + 64:
            self._heap = [(k, n) for n, k in self._keys.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (key, name))

    def discard(self, name: str) -> None:
        self._keys.pop(name, None)

    def first(self) -> tuple[Key, str] | None:
        """The least (key, name); None when there is no name."""
        while self._heap:
            key, name = self._heap[0]
            if self._keys.get(name) == key:
                return key, name
            heapq.heappop(self._heap)
        return None
