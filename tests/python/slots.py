"""Helpers of the unit tests that touch pool slots."""

from __future__ import annotations

import numpy as np

from kvtransfer import BlockLayout, BlockStore, BufferPool, make_pool

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


def put(store: BlockStore, keys: np.ndarray, seed: int = 1) -> np.ndarray:
    """Stores random blocks under a whole chain; returns them as [n, bytes]."""
    pool = make_pool(store.layout, len(keys))
    slots = pool.acquire(len(keys))
    assert slots is not None
    data = fill(pool, slots, store.layout, seed)
    assert store.put(keys, ROOT_KEY, pool, slots) == len(keys)
    return data


def get(store: BlockStore, keys: np.ndarray) -> np.ndarray:
    """The good prefix of a chain as [n, bytes]."""
    pool = make_pool(store.layout, len(keys))
    slots = pool.acquire(len(keys))
    assert slots is not None
    good = store.get(keys, ROOT_KEY, pool, slots)
    return read(pool, slots[:good], store.layout) if good else np.empty((0, 0), np.uint8)
