"""Every integration test must leave nothing behind."""

from __future__ import annotations

import glob
import subprocess
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Whatever a test does to a cluster, nothing of it may be left."""
    before = set(glob.glob("/tmp/kvt-*")) | set(glob.glob("/dev/shm/*"))
    yield
    found = subprocess.run(
        ["pgrep", "--runstates", "R,S,D", "-x", r"kvt-(scheduler|[pd]e[0-9]+)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == "", "orphan engine processes"
    after = set(glob.glob("/tmp/kvt-*")) | set(glob.glob("/dev/shm/*"))
    assert after <= before, "files left behind"
