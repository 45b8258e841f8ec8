"""Fixtures of the unit tests."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from slots import ROOT_KEY

from kvtransfer import BlockLayout, BlockStore, BufferPool, make_pool

# The core and the policy work without the extra `models`; so do their tests.
NEED_TORCH = [
    "test_engines.py",
    "test_models.py",
    "test_process.py",
    "test_records.py",
    "test_reference.py",
    "test_replay_options.py",
    "test_runner.py",
    "test_scheduler_process.py",
    "test_sequences.py",
]
collect_ignore = [] if find_spec("torch") else NEED_TORCH


def pytest_report_header() -> str:
    return f"not collected, no torch: {', '.join(collect_ignore)}" if collect_ignore else ""


@pytest.fixture
def layout() -> BlockLayout:
    return BlockLayout(6, 16, [64, 64, 64, 64])


@pytest.fixture
def pool(layout: BlockLayout) -> BufferPool:
    return make_pool(layout, 32)


@pytest.fixture
def store(tmp_path: Path, layout: BlockLayout) -> BlockStore:
    return BlockStore(str(tmp_path / "store"), ROOT_KEY, layout)
