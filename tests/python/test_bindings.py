"""What crosses the boundary: dtypes, shapes, strides, lifetimes, documentation."""

from __future__ import annotations

import gc
import inspect
import runpy
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from slots import ROOT_KEY, fill, read

import kvtransfer._core as core
from kvtransfer import (
    BlockLayout,
    BlockStore,
    BufferPool,
    LayerStream,
    MemoryRegion,
    TrafficManager,
)
from kvtransfer.errors import InvalidArgument
from kvtransfer.layout import CacheLayer, CachePlane, PagedCache, header_bytes
from kvtransfer.memory import HugePages, RegionKind, make_pool

KEYS = np.random.default_rng(0).integers(0, 256, (4, 32), np.uint8)
EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


def test_layouts_compare_by_value_and_show_their_sizes() -> None:
    a, b = BlockLayout(4, 64, [128, 128]), BlockLayout.per_layer(64, [[128, 128]] * 4)
    assert a == b
    assert a.digest == b.digest
    assert a != BlockLayout(4, 64, [256])
    assert repr(a) == "BlockLayout(4 layers x 64 tokens x 256 B in 2 planes)"
    assert [a.layer_offset(i) for i in range(5)] == [i * 16384 for i in range(5)]
    assert a.layer_bytes(3) == 16384
    assert a.bytes_per_token == 1024
    for bad in (lambda: a.layer_offset(5), lambda: a.layer_bytes(4)):
        with pytest.raises(IndexError):
            bad()
    assert a.cut_layers(2) == [0, 2, 4]


@pytest.mark.parametrize("kind", [RegionKind.anonymous, RegionKind.shared])
def test_regions_are_arrays_of_the_asked_size(kind: RegionKind) -> None:
    region = MemoryRegion(10_000, kind, HugePages.off)
    array = region.array()
    assert array.dtype == np.uint8
    assert array.shape == (10_000,)
    assert array.flags.writeable
    assert not array.any()
    array[-1] = 9
    assert region.array()[-1] == 9, "one memory, however often it is looked at"
    assert (region.fd >= 0) == (kind == RegionKind.shared)
    assert region.page_bytes == 4096
    with pytest.raises(InvalidArgument, match="0 bytes"):
        MemoryRegion(0)


def test_an_array_outlives_every_name_of_its_region() -> None:
    region = MemoryRegion(4096)
    gone = weakref.ref(region)
    array = region.array()
    del region
    gc.collect()
    array[:] = 3
    assert gone() is not None, "held by the array"
    del array
    gc.collect()
    assert gone() is None


def test_slots_are_u32_arrays_and_offsets_u64(pool: BufferPool, layout: BlockLayout) -> None:
    slots = pool.acquire(3)
    assert slots is not None
    assert slots.dtype == np.uint32
    offsets = pool.payload_offsets(slots)
    assert offsets.dtype == np.uint64
    header = header_bytes(layout.num_layers)
    assert offsets.tolist() == [int(s) * pool.slot_bytes + header for s in slots]
    assert pool.payload_offsets(slots.tolist()).tolist() == offsets.tolist(), "lists do, too"
    with pytest.raises(IndexError):
        pool.payload_offsets([999])
    pool.release(slots.tolist())
    assert pool.available == pool.num_slots
    assert pool.low_watermark == pool.num_slots - 3


def test_arrays_of_other_strides_and_dtypes_are_converted(
    store: BlockStore, pool: BufferPool, layout: BlockLayout
) -> None:
    slots = pool.acquire(4)
    assert slots is not None
    data = fill(pool, slots, layout, 3)
    wide = np.zeros((4, 64), np.uint8)
    wide[:, ::2] = KEYS
    assert store.put(wide[:, ::2], ROOT_KEY, pool, slots.astype(np.int64)) == 4
    assert store.lookup(np.asfortranarray(KEYS), ROOT_KEY) == 4
    into = pool.acquire(4)
    assert into is not None
    assert store.get(KEYS, ROOT_KEY, pool, into[::-1]) == 4
    np.testing.assert_array_equal(read(pool, into[::-1], layout), data)


@pytest.mark.parametrize("keys", [np.zeros((2, 31), np.uint8), np.zeros(64, np.uint8)])
def test_keys_of_another_shape_are_refused(store: BlockStore, keys: np.ndarray) -> None:
    with pytest.raises(InvalidArgument, match=r"\[n, 32\]"):
        store.lookup(keys, ROOT_KEY)
    with pytest.raises(InvalidArgument, match="32 bytes"):
        store.lookup(KEYS, b"short")


def test_a_slot_per_key_is_required(store: BlockStore, pool: BufferPool) -> None:
    with pytest.raises(InvalidArgument, match="one slot per key"):
        store.put(KEYS, ROOT_KEY, pool, np.array([0], np.uint32))
    with pytest.raises(IndexError):
        store.get(KEYS[:1], ROOT_KEY, pool, np.array([10_000], np.uint32))


def test_none_and_wrong_types_are_type_errors(store: BlockStore, layout: BlockLayout) -> None:
    with pytest.raises(TypeError):
        store.lookup(KEYS, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        BlockLayout("4", 64, [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        BlockLayout(-1, 64, [1])
    with pytest.raises(TypeError):
        LayerStream()  # type: ignore[call-arg]


def test_the_manager_keeps_what_it_needs_alive(tmp_path: Path, layout: BlockLayout) -> None:
    store = BlockStore(str(tmp_path / "s"), ROOT_KEY, layout)
    pool = make_pool(layout, 8)
    slots = pool.acquire(4)
    assert slots is not None
    manager = TrafficManager(store=store, pool=pool, device=None, layout=layout)
    ticket = manager.persist(keys=KEYS, parent=ROOT_KEY, slots=slots)
    del store, pool
    gc.collect()
    assert ticket.wait(10)
    assert ticket.blocks == 4
    del manager
    gc.collect()
    assert ticket.done, "a ticket may be asked after its manager is gone"
    assert ticket.error is None


def test_a_ticket_tells_how_its_operation_ended(manager_with_cap: TrafficManager) -> None:
    stream = manager_with_cap.make_stream(1)
    ticket = manager_with_cap.serve(after=stream, peer=0, tag=0, timeout_s=0.05)
    assert ticket.wait(5)
    assert ticket.error is not None
    assert ticket.error[0] in ("timeout", "peer_lost")
    assert ticket.seconds >= 0
    assert ticket.end_ns > 0


@pytest.fixture
def manager_with_cap(pool: BufferPool, layout: BlockLayout) -> TrafficManager:
    return TrafficManager(
        store=None,
        pool=pool,
        device=None,
        layout=layout,
        bytes_per_second={"device_copy": 1000},
    )


def test_waiting_threads_do_not_hold_each_other_up() -> None:
    stream = LayerStream(1)
    woken = []
    threads = [
        threading.Thread(target=lambda: (stream.wait(0, 10), woken.append(1))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    stream.arrive(0)
    for thread in threads:
        thread.join(5)
    assert len(woken) == 8


def test_planned_ranges_are_rows_of_three() -> None:
    cache = PagedCache(8192, 16, 4, [CacheLayer(0, 1024, [CachePlane(0, 64, 64)])])
    layout = BlockLayout(1, 16, [64])
    ranges = cache.plan(layout, 0, 0, [3, 1], [0, 4096], 0, 32)
    assert ranges.dtype == np.uint64
    assert ranges.tolist() == [[3072, 0, 1024], [1024, 4096, 1024]]
    assert cache.plan(layout, 0, 0, [3], [0], 0, 0).shape == (0, 3)


def test_public_classes_and_methods_are_documented() -> None:
    classes = [c for _, c in inspect.getmembers(core, inspect.isclass)]
    assert classes
    for name in ("load", "persist", "stage", "stage_from_peer", "push", "serve"):
        text = getattr(core.TrafficManager, name).__doc__
        assert text is not None
        assert len(text.split("\n")[-2]) > 20, name
    for cls in (core.BlockLayout, core.PagedCache, core.MemoryRegion, core.BufferPool):
        assert cls.__doc__


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are not beside these tests")
def test_the_asyncio_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "asyncio_engine.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "8 blocks persisted" in out
    assert "layer 15 of 8 blocks is ready" in out
