"""Tests on real verbs devices; run by tests/vm/suite.sh inside the virtual machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

if "KVT_IN_VM" not in os.environ:
    collect_ignore_glob = ["*.py"]  # the devices are in the virtual machine: make test-vm
else:
    from kvtransfer.engine.process import prepare_processes

    prepare_processes()  # imports while the C++ tests run


@pytest.fixture(scope="session", autouse=True)
def _devices_are_free() -> None:
    """The C++ tests take links down and devices away; this process only imports meanwhile."""
    while Path("/tmp/kvt-devices-in-use").exists():
        time.sleep(0.2)
