"""Fixtures of the unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from slots import ROOT_KEY

from kvtransfer import BlockLayout, BlockStore, BufferPool, make_pool


@pytest.fixture
def layout() -> BlockLayout:
    return BlockLayout(6, 16, [64, 64, 64, 64])


@pytest.fixture
def pool(layout: BlockLayout) -> BufferPool:
    return make_pool(layout, 32)


@pytest.fixture
def store(tmp_path: Path, layout: BlockLayout) -> BlockStore:
    return BlockStore(str(tmp_path / "store"), ROOT_KEY, layout)
