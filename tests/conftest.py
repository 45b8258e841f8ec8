"""Shared by all tests: hypothesis settings, and where the public traces lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")


@pytest.fixture
def data_dir() -> Path:
    """The public traces; tests that need them are skipped without."""
    default = Path(__file__).parents[2] / "shared" / "data"
    found = Path(os.environ.get("KVTRANSFER_DATA", default))
    if not found.is_dir():
        pytest.skip(f"no traces at {found} (KVTRANSFER_DATA may name their place)")
    return found
