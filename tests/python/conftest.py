"""Shared fixtures: layouts, stores, and where the public traces lie."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from kvtransfer import BlockLayout, BlockStore, BufferPool, make_pool

settings.register_profile(
    "default", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")

ROOT_KEY = bytes(range(32))


@pytest.fixture
def layout() -> BlockLayout:
    return BlockLayout(6, 16, [64, 64, 64, 64])


@pytest.fixture
def pool(layout: BlockLayout) -> BufferPool:
    return make_pool(layout, 32)


@pytest.fixture
def store(tmp_path: Path, layout: BlockLayout) -> BlockStore:
    return BlockStore(str(tmp_path / "store"), ROOT_KEY, layout)


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


@pytest.fixture
def data_dir() -> Path:
    """The public traces; tests that need them are skipped without."""
    default = Path(__file__).parents[3] / "shared" / "data"
    found = Path(os.environ.get("KVTRANSFER_DATA", default))
    if not found.is_dir():
        pytest.skip(f"no traces at {found} (KVTRANSFER_DATA may name their place)")
    return found
