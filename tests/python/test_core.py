"""Store, pool, streams and traffic manager through their Python faces."""

from __future__ import annotations

import asyncio
import gc
import select
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from slots import ROOT_KEY, fill, read

import kvtransfer
from kvtransfer import BlockLayout, BlockStore, BufferPool, LayerStream, TrafficManager, chain_keys
from kvtransfer.errors import (
    CorruptBlock,
    InvalidArgument,
    KVTransferError,
    Mismatch,
    StorageError,
    TransferTimeout,
    from_code,
)
from kvtransfer.transport import IoBackend, probe_io

KEYS = chain_keys(ROOT_KEY, np.arange(16 * 8), 16)


def test_the_public_names_are_pinned() -> None:
    assert sorted(kvtransfer.__all__) == [
        "BlockLayout",
        "BlockStore",
        "BufferPool",
        "KVTransferError",
        "LayerStream",
        "MemoryRegion",
        "Namespace",
        "PagedCache",
        "TrafficManager",
        "__version__",
        "chain_keys",
        "make_pool",
    ]
    for name in kvtransfer.__all__:
        assert getattr(kvtransfer, name) is not None


def test_every_core_error_code_has_its_class() -> None:
    assert isinstance(from_code("corrupt", 0, "x"), CorruptBlock)
    assert isinstance(from_code("timeout", 0, "x"), TimeoutError)
    assert isinstance(from_code("invalid_argument", 0, "x"), ValueError)
    assert type(from_code("something new", 5, "x")) is KVTransferError
    assert from_code("io", 5, "x").sys_errno == 5


def test_put_lookup_get(store: BlockStore, pool: BufferPool, layout: BlockLayout) -> None:
    slots = pool.acquire(8)
    data = fill(pool, slots, layout, 1)
    assert store.put(KEYS, ROOT_KEY, pool, slots) == 8
    assert store.lookup(KEYS, ROOT_KEY) == 8
    into = pool.acquire(8)
    assert store.get(KEYS, ROOT_KEY, pool, into) == 8
    np.testing.assert_array_equal(read(pool, into, layout), data)


def test_a_corrupt_block_is_a_miss(
    store: BlockStore, pool: BufferPool, layout: BlockLayout
) -> None:
    slots = pool.acquire(8)
    fill(pool, slots, layout, 1)
    store.put(KEYS, ROOT_KEY, pool, slots)
    path = Path(store.path_of(KEYS[3].tobytes(), KEYS[2].tobytes()))
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    assert store.get(KEYS, ROOT_KEY, pool, pool.acquire(8)) == 3
    assert store.stats()["corrupt"] == 1


def test_stores_of_another_namespace_or_layout_are_refused(store: BlockStore) -> None:
    with pytest.raises(Mismatch, match="another store directory"):
        BlockStore(store.root, bytes(32), store.layout)
    with pytest.raises(Mismatch):
        BlockStore(store.root, ROOT_KEY, BlockLayout(6, 32, [64] * 4))
    with pytest.raises(StorageError):
        BlockStore("/proc/nowhere", ROOT_KEY, store.layout)
    with pytest.raises(InvalidArgument, match="32 bytes"):
        BlockStore(store.root, b"short", store.layout)


def test_the_pool_gives_all_or_nothing(pool: BufferPool) -> None:
    slots = pool.acquire(30)
    assert pool.acquire(3) is None
    assert pool.acquire(10**9) is None
    pool.release(slots[:1])
    assert len(pool.acquire(3)) == 3
    with pytest.raises(InvalidArgument, match="not held"):
        pool.release(slots[:1].repeat(3))


def test_array_views_keep_their_region_alive(layout: BlockLayout) -> None:
    pool = kvtransfer.make_pool(layout, 2)
    view = pool.region.array()
    del pool
    gc.collect()
    view[:] = 7
    assert int(view[-1]) == 7


def test_waiting_releases_the_gil_and_ends_at_the_deadline() -> None:
    stream = LayerStream(2)
    beats = []
    done = threading.Event()

    def beat() -> None:
        while not done.is_set():
            beats.append(time.monotonic())
            time.sleep(0.005)

    thread = threading.Thread(target=beat)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(TransferTimeout, match="layer 1 of 2"):
        stream.wait(1, 0.2)
    waited = time.monotonic() - begin
    done.set()
    thread.join()
    assert waited > 0.15
    assert sum(begin < t < begin + 0.2 for t in beats) > 5, "another thread must run meanwhile"
    stream.arrive(1)
    stream.wait(1, 0)
    with pytest.raises(IndexError):
        stream.wait(2, 0)


def test_a_failed_stream_raises_the_typed_error() -> None:
    stream = LayerStream(1)
    stream.fail("withdrawn")
    with pytest.raises(KVTransferError, match="withdrawn"):
        stream.wait(0, 1)
    assert stream.failure == ("cancelled", "withdrawn")


@pytest.fixture
def manager(store: BlockStore, pool: BufferPool, layout: BlockLayout) -> TrafficManager:
    return TrafficManager(store=store, pool=pool, device=None, layout=layout, trace=True)


def test_load_streams_layers_and_reports_a_bad_block(
    manager: TrafficManager, store: BlockStore, pool: BufferPool, layout: BlockLayout
) -> None:
    slots = pool.acquire(8)
    data = fill(pool, slots, layout, 2)
    ticket = manager.persist(keys=KEYS, parent=ROOT_KEY, slots=slots)
    assert ticket.wait(10)
    assert ticket.blocks == 8
    assert ticket.fresh == [True] * 8
    into = pool.acquire(8)
    stream = manager.make_stream(8)
    loaded = manager.load(keys=KEYS, parent=ROOT_KEY, slots=into, parts=6, into=stream)
    for layer in range(6):
        stream.wait(layer, 10)
    np.testing.assert_array_equal(read(pool, into, layout), data)
    assert loaded.wait(10)
    loaded.check()
    Path(store.path_of(KEYS[5].tobytes(), KEYS[4].tobytes())).unlink()
    stream = manager.make_stream(8)
    failed = manager.load(keys=KEYS, parent=ROOT_KEY, slots=into, into=stream)
    assert failed.wait(10)
    assert failed.blocks == 5
    with pytest.raises(StorageError, match="block 5 of 8"):
        failed.check()
    with pytest.raises(StorageError, match="block 5 of 8"):
        stream.wait(5, 10)
    events = manager.take_trace()
    assert set(events["kind"].tolist()) == {0, 1}
    assert (events["end_ns"] >= events["begin_ns"]).all()


def test_the_event_descriptor_serves_asyncio(
    manager: TrafficManager, pool: BufferPool, layout: BlockLayout
) -> None:
    async def main() -> int:
        changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(manager.event_fd(), changed.set)
        slots = pool.acquire(8)
        fill(pool, slots, layout, 3)
        ticket = manager.persist(keys=KEYS, parent=ROOT_KEY, slots=slots)
        while not ticket.done:
            await asyncio.wait_for(changed.wait(), 10)
            changed.clear()
            manager.drain_events()
        return int(ticket.blocks)

    assert asyncio.run(main()) == 8
    manager.drain_events()
    assert select.select([manager.event_fd()], [], [], 0)[0] == []


def test_bad_arguments_are_refused_before_anything_starts(manager: TrafficManager) -> None:
    with pytest.raises(InvalidArgument, match="one slot per block"):
        manager.load(keys=KEYS, parent=ROOT_KEY, slots=np.array([0]))
    with pytest.raises(InvalidArgument, match=r"slot 99 outside"):
        manager.load(keys=KEYS[:1], parent=ROOT_KEY, slots=np.array([99]))
    with pytest.raises(InvalidArgument, match=r"\[n, 32\]"):
        manager.load(keys=KEYS.reshape(-1), parent=ROOT_KEY, slots=np.array([0]))
    with pytest.raises(InvalidArgument, match="traffic kind"):
        manager.set_cap("teleport", 1)
    with pytest.raises(InvalidArgument, match="device cache"):
        manager.stage(cache=None, pages=[], block_starts=[], first_token=0, num_tokens=0)


def test_the_backend_and_its_reason_can_be_read() -> None:
    backend, reason = probe_io()
    assert backend == "uring" or "io_uring" in reason
    assert probe_io(IoBackend.threads)[0] == "threads"
