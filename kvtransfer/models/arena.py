"""Arena: the "device" KV memory of an engine, a paged cache whose sequences are contiguous.

Layout of one region, for R layer slots, H KV heads and capacity N tokens::

    [R, 2, H, N, head_dim]      index 1: keys, values

A sequence gets a run of adjacent pages, so that its keys in a layer slot are a strided view
``[H, T, head_dim]`` that attention reads in place. A decode engine has a slot per layer; a prefill
engine has three and rotates through them: one loading, one computing, one leaving.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.errors import InvalidArgument
from kvtransfer.layout import CacheLayer, CachePlane, PagedCache
from kvtransfer.memory import MemoryRegion

__all__ = ["PAGE_TOKENS", "Arena", "ArenaSpan"]

PAGE_TOKENS = 16


@dataclass(frozen=True)
class ArenaSpan:
    """A run of pages that belongs to one sequence: tokens [start, start + capacity)."""

    first_page: int
    num_pages: int

    @property
    def start(self) -> int:
        return self.first_page * PAGE_TOKENS

    @property
    def capacity(self) -> int:
        return self.num_pages * PAGE_TOKENS

    @property
    def pages(self) -> npt.NDArray[np.int32]:
        return np.arange(self.first_page, self.first_page + self.num_pages, dtype=np.int32)


class Arena:
    """Not thread-safe; belongs to the engine's loop. Transfers reach it through ``region``."""

    def __init__(
        self, num_slots: int, num_heads: int, head_dim: int, dtype: torch.dtype, num_tokens: int
    ) -> None:
        num_pages = -(-num_tokens // PAGE_TOKENS)
        capacity = num_pages * PAGE_TOKENS
        row_bytes = head_dim * dtype.itemsize
        plane_bytes = capacity * row_bytes
        slot_bytes = 2 * num_heads * plane_bytes
        self.region = MemoryRegion(num_slots * slot_bytes)
        planes = [CachePlane(p * plane_bytes, row_bytes, row_bytes) for p in range(2 * num_heads)]
        self.cache = PagedCache(
            self.region.num_bytes,
            PAGE_TOKENS,
            num_pages,
            [CacheLayer(s * slot_bytes, PAGE_TOKENS * row_bytes, planes) for s in range(num_slots)],
        )
        self.num_slots = num_slots
        self.num_tokens = capacity
        flat = torch.from_numpy(self.region.array())
        self._kv = flat.view(dtype).view(num_slots, 2, num_heads, capacity, head_dim)
        self._free: list[tuple[int, int]] = [(0, num_pages)]  # (first page, count), sorted
        self.peak_tokens = 0
        self._used_pages = 0

    # ------------------------------------------------------------------ allocation

    def allocate(self, num_tokens: int) -> ArenaSpan | None:
        """First fit; None when no run of pages is long enough."""
        wanted = max(-(-num_tokens // PAGE_TOKENS), 1)
        for i, (first, count) in enumerate(self._free):
            if count >= wanted:
                self._free[i : i + 1] = [(first + wanted, count - wanted)] if count > wanted else []
                self._used_pages += wanted
                self.peak_tokens = max(self.peak_tokens, self._used_pages * PAGE_TOKENS)
                return ArenaSpan(first, wanted)
        return None

    def free(self, span: ArenaSpan) -> None:
        self._used_pages -= span.num_pages
        runs = sorted([*self._free, (span.first_page, span.num_pages)])
        merged: list[tuple[int, int]] = []
        for first, count in runs:
            if merged and sum(merged[-1]) > first:
                raise InvalidArgument(f"pages at {first} were free already")
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + count)
            else:
                merged.append((first, count))
        self._free = merged

    @property
    def free_tokens(self) -> int:
        """The longest sequence that could be allocated now."""
        return max((count for _, count in self._free), default=0) * PAGE_TOKENS

    # ------------------------------------------------------------------ tensors

    def write(
        self, slot: int, span: ArenaSpan, first: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Stores ``[H, n, head_dim]`` keys and values at tokens [first, first + n)."""
        at = slice(span.start + first, span.start + first + keys.shape[1])
        self._kv[slot, 0, :, at] = keys
        self._kv[slot, 1, :, at] = values

    def view(self, slot: int, span: ArenaSpan, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first ``length`` tokens, ``[H, length, head_dim]``, no copy."""
        at = slice(span.start, span.start + length)
        return self._kv[slot, 0, :, at], self._kv[slot, 1, :, at]
