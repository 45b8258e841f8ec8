"""One store through two mounts: a directory, and a FUSE file system over it that can hang."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from slots import ROOT_KEY, get, put, read

from kvtransfer import BlockLayout, BlockStore, TrafficManager, chain_keys, make_pool

LAYOUT = BlockLayout(3, 8, [512])
KEYS = chain_keys(ROOT_KEY, np.arange(8 * 8), 8)
TIMEOUT_S = 0.3


@dataclass
class Mounts:
    plain: str
    fuse: str
    daemon: int


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    if shutil.which("bindfs") is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs bindfs and /dev/fuse")
    plain, fuse = tmp_path / "plain", tmp_path / "fuse"
    plain.mkdir()
    fuse.mkdir()
    daemon = subprocess.Popen(["bindfs", "-f", str(plain), str(fuse)], stderr=subprocess.PIPE)
    for _ in range(100):
        if fuse.is_mount() or daemon.poll() is not None:
            break
        time.sleep(0.05)
    if not fuse.is_mount():
        pytest.skip(f"FUSE mounts are not allowed here: {daemon.communicate()[1]!r}")
    try:
        yield Mounts(str(plain), str(fuse), daemon.pid)
    finally:
        daemon.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "-l", str(fuse)], check=False)
        daemon.terminate()
        daemon.communicate(timeout=10)


def test_what_one_mount_writes_the_other_finds_without_a_restart(mounts: Mounts) -> None:
    here, there = (BlockStore(root, ROOT_KEY, LAYOUT) for root in (mounts.plain, mounts.fuse))
    other = chain_keys(ROOT_KEY, np.arange(64) + 1000, 8)
    assert there.lookup(KEYS, ROOT_KEY) == here.lookup(other, ROOT_KEY) == 0
    one, two = put(here, KEYS, 1), put(there, other, 2)
    deadline = time.monotonic() + 5  # FUSE may remember for a second that a file was not there
    while there.lookup(KEYS, ROOT_KEY) < len(KEYS) and time.monotonic() < deadline:
        time.sleep(0.05)
    np.testing.assert_array_equal(get(there, KEYS), one)
    np.testing.assert_array_equal(get(here, other), two)


def test_both_mounts_together_keep_one_cap(mounts: Mounts) -> None:
    file_bytes = make_pool(LAYOUT, 1).slot_bytes
    stores = [
        BlockStore(root, ROOT_KEY, LAYOUT, max_bytes=20 * file_bytes)
        for root in (mounts.plain, mounts.fuse)
    ]
    for chain in range(12):
        keys = chain_keys(ROOT_KEY, np.arange(64) + 10_000 * (chain + 1), 8)
        put(stores[chain % 2], keys, chain)
    for store in stores:
        store.evict()
    files = list(Path(mounts.plain).rglob("*.kvb"))
    assert len(files) <= 20
    for store in stores:
        store.rescan()
        assert store.stats()["blocks"] == len(files)


def test_a_mount_that_hangs_is_a_miss_until_it_answers_and_keeps_no_waiter(mounts: Mounts) -> None:
    store = BlockStore(mounts.fuse, ROOT_KEY, LAYOUT, operation_timeout_s=TIMEOUT_S)
    data = put(store, KEYS, 3)
    pool = make_pool(LAYOUT, 3 * len(KEYS))
    manager = TrafficManager(store=store, pool=pool, device=None, layout=LAYOUT)
    slots = pool.acquire(len(KEYS))
    assert slots is not None
    time.sleep(1.2)  # what FUSE remembers is forgotten
    os.kill(mounts.daemon, signal.SIGSTOP)
    begin = time.monotonic()
    stream = manager.make_stream(len(KEYS))
    ticket = manager.load(keys=KEYS, parent=ROOT_KEY, slots=slots, into=stream)
    assert ticket.wait(10)
    assert ticket.error is not None
    assert ticket.error[0] == "timeout"
    assert stream.failed
    assert store.stats()["mount_slow"]
    pool.release(slots)
    assert pool.available == 2 * len(KEYS), "reads may still land in those slots"
    # Nothing more is asked of it: lookups, loads and persists end at once.
    asked = time.monotonic()
    assert store.lookup(KEYS, ROOT_KEY) == 0
    more = pool.acquire(len(KEYS))
    assert more is not None
    again = manager.load(keys=KEYS, parent=ROOT_KEY, slots=more)
    stored = manager.persist(keys=KEYS, parent=ROOT_KEY, slots=more)
    assert again.wait(5)
    assert stored.wait(5)
    assert again.blocks == 0
    assert time.monotonic() - asked < TIMEOUT_S * 5
    assert time.monotonic() - begin < 10
    os.kill(mounts.daemon, signal.SIGCONT)
    deadline = time.monotonic() + 10
    while (store.stats()["mount_slow"] or pool.available < 2 * len(KEYS)) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.02)
    assert not store.stats()["mount_slow"]
    assert pool.available == 2 * len(KEYS), "the slots came back with the mount"
    final = manager.load(keys=KEYS, parent=ROOT_KEY, slots=more)
    assert final.wait(10)
    assert final.blocks == len(KEYS), final.error
    np.testing.assert_array_equal(read(pool, more, LAYOUT), data)


def test_a_store_on_a_hanging_mount_is_not_opened_and_says_so(mounts: Mounts) -> None:
    put(BlockStore(mounts.fuse, ROOT_KEY, LAYOUT), KEYS, 3)
    time.sleep(1.2)
    os.kill(mounts.daemon, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match="doesn't answer"):
        BlockStore(mounts.fuse, ROOT_KEY, LAYOUT, operation_timeout_s=0.02)
