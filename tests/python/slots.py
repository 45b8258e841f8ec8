"""Helpers of the unit tests that touch pool slots."""

from __future__ import annotations

import numpy as np

from kvtransfer import BlockLayout, BufferPool

ROOT_KEY = bytes(range(32))


def fill(pool: BufferPool, slots: np.ndarray, layout: BlockLayout, seed: int) -> np.ndarray:
    """Random Full Blocks in the slots; returns them as [n, bytes]."""
    data = np.random.default_rng(seed).integers(
        0, 256, (len(slots), layout.full_block_bytes), np.uint8
    )
    for offset, block in zip(pool.payload_offsets(slots), data, strict=True):
        pool.region.array()[int(offset) : int(offset) + len(block)] = block
    return data


def read(pool: BufferPool, slots: np.ndarray, layout: BlockLayout) -> np.ndarray:
    array = pool.region.array()
    size = layout.full_block_bytes
    return np.stack([array[int(o) : int(o) + size].copy() for o in pool.payload_offsets(slots)])
