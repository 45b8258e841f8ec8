"""The transfers of figure 4 between two processes, through the Python API alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slots import ROOT_KEY, fill, read

from kvtransfer import BlockLayout, BlockStore, MemoryRegion, PagedCache, TrafficManager, chain_keys
from kvtransfer.errors import PeerLost, TransferTimeout
from kvtransfer.layout import CacheLayer, CachePlane
from kvtransfer.memory import make_pool

LAYERS, BLOCK, WIDTH, PAGES = 6, 16, 64, 10
LAYOUT = BlockLayout(LAYERS, BLOCK, [WIDTH, WIDTH])
BLOCKS, TOKENS = 8, 8 * BLOCK
KEYS = chain_keys(ROOT_KEY, np.arange(TOKENS), BLOCK)


def make_cache(slots: int) -> tuple[MemoryRegion, PagedCache]:
    plane = PAGES * BLOCK * WIDTH
    region = MemoryRegion(slots * 2 * plane)
    planes = [CachePlane(0, WIDTH, WIDTH), CachePlane(plane, WIDTH, WIDTH)]
    layers = [CacheLayer(i * 2 * plane, BLOCK * WIDTH, planes) for i in range(slots)]
    return region, PagedCache(region.num_bytes, BLOCK, PAGES, layers)


def decode_side(pipe: Connection, name: str, store_path: str) -> None:
    """A DE: stores blocks, loads them into its buffer, serves them, and counts what comes back."""
    pool = make_pool(LAYOUT, 16)
    store = BlockStore(store_path, ROOT_KEY, LAYOUT)
    manager = TrafficManager(
        store=store, pool=pool, device=None, layout=LAYOUT, name="de", listen=name
    )
    slots = pool.acquire(BLOCKS)
    assert slots is not None
    received = manager.make_stream(1)
    tag = manager.open_receive(received)
    data = fill(pool, slots, LAYOUT, 5)
    persisted = manager.persist(keys=KEYS, parent=ROOT_KEY, slots=slots)
    assert persisted.wait(10)
    pool.region.array()[:] = 0
    pipe.send((tag, pool.payload_offsets(slots), data))
    while True:
        order = pipe.recv()
        if order == "load and serve":
            source = manager.make_stream(BLOCKS)
            manager.load(keys=KEYS, parent=ROOT_KEY, slots=slots, parts=LAYERS, into=source)
            peer = manager.wait_peer("pe", 5)
            manager.serve(after=source, peer=peer, tag=pipe.recv(), slots=slots)
        elif order == "what came":
            for layer in range(LAYERS):
                received.wait(layer, 10)
            pipe.send(read(pool, slots, LAYOUT))
        elif order == "counters":
            pipe.send(manager.counters())
        elif order == "stop":
            return


@pytest.fixture
def de(tmp_path: Path) -> Iterator[tuple[Connection, str, multiprocessing.process.BaseProcess]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    name = f"kvt-test-{os.getpid()}-{tmp_path.name}-de"
    process = context.Process(target=decode_side, args=(theirs, name, str(tmp_path / "store")))
    process.start()
    yield ours, name, process
    if process.is_alive():
        ours.send("stop")
    process.join(10)
    ours.close()
    theirs.close()
    assert not process.is_alive()


class Prefill:
    """A PE with three layer slots."""

    def __init__(self, de_address: str) -> None:
        self.region, self.cache = make_cache(3)
        self.pool = make_pool(LAYOUT, 4)
        self.manager = TrafficManager(
            store=None,
            pool=self.pool,
            device=self.region,
            layout=LAYOUT,
            name="pe",
            listen=f"{de_address}-pe",
        )
        self.peer = self.manager.connect(de_address, 10)
        self.pages = np.random.default_rng(1).permutation(PAGES)[:BLOCKS].astype(np.int32)

    def common(self, starts: np.ndarray, **more: Any) -> dict[str, Any]:
        return {
            "cache": self.cache,
            "pages": self.pages,
            "block_starts": starts,
            "first_token": 0,
            "num_tokens": TOKENS,
            "peer": self.peer,
            "timeout_s": 10,
            **more,
        }

    def layer(self, layer: int) -> np.ndarray:
        """[2, TOKENS, WIDTH] of the layer's slot, in the order of the sequence."""
        shape = (3, 2, PAGES, BLOCK, WIDTH)
        whole = self.region.array()[: int(np.prod(shape))].reshape(shape)[layer % 3]
        return whole[:, self.pages].reshape(2, TOKENS, WIDTH)


def test_the_de_path_brings_every_byte_and_takes_back_what_was_computed(
    de: tuple[Connection, str, multiprocessing.process.BaseProcess],
) -> None:
    pipe, name, _ = de
    tag, starts, data = pipe.recv()
    blocks = data.reshape(BLOCKS, LAYERS, 2, BLOCK, WIDTH)
    pe = Prefill(name)
    notice = pe.manager.make_stream(1)
    ready, computed, released = (pe.manager.make_stream(n) for n in (1, 1, 2))
    pipe.send("load and serve")
    pipe.send(pe.manager.open_receive(notice))
    staged = pe.manager.stage_from_peer(
        **pe.common(starts, after=notice, into=ready, gate=released)
    )
    pushed = pe.manager.push(**pe.common(starts, after=computed, into=released, tag=tag))
    for layer in range(LAYERS):
        ready.wait(layer, 10)
        wanted = blocks[:, layer].transpose(1, 0, 2, 3).reshape(2, TOKENS, WIDTH)
        np.testing.assert_array_equal(pe.layer(layer), wanted)
        shape = (3, 2, PAGES, BLOCK, WIDTH)
        view = pe.region.array()[: int(np.prod(shape))].reshape(shape)[layer % 3]
        view[:] = ~view  # "computation": every byte changes
        computed.publish(layer)
        released.publish(layer)
    assert staged.wait(10)
    assert pushed.wait(10)
    pushed.check()
    pipe.send("what came")
    np.testing.assert_array_equal(pipe.recv(), ~data)
    moved = TOKENS * LAYOUT.bytes_per_token
    ours = pe.manager.counters()
    assert ours["network_read"]["bytes"] == ours["network_write"]["bytes"] == moved
    assert ours["storage_read"]["bytes"] == ours["device_copy"]["bytes"] == 0
    assert pe.pool.low_watermark == pe.pool.num_slots, "nothing came through the PE's host pool"
    pipe.send("counters")
    assert pipe.recv()["storage_read"]["bytes"] == BLOCKS * LAYOUT.full_block_bytes
    ring = pe.manager.ring_counters()
    assert ring["doorbells"] < ring["work_requests"] / 4
    assert ring["flushed"] == 0


def test_the_death_of_the_de_ends_every_wait_with_peer_lost(
    de: tuple[Connection, str, multiprocessing.process.BaseProcess],
) -> None:
    pipe, name, process = de
    tag, starts, _ = pipe.recv()
    pe = Prefill(name)
    ready, computed = pe.manager.make_stream(1), pe.manager.make_stream(1)
    never = pe.manager.make_stream(1)
    reading = pe.manager.stage_from_peer(**pe.common(starts, after=never, into=ready))
    pushing = pe.manager.push(**pe.common(starts, after=computed, tag=tag))
    assert pe.manager.peer_alive(pe.peer)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(10)
    for ticket in (reading, pushing):
        assert ticket.wait(10)
        with pytest.raises(PeerLost, match="de"):
            ticket.check()
    with pytest.raises(PeerLost):
        ready.wait(0, 5)
    assert not pe.manager.peer_alive(pe.peer)


def test_connecting_to_nobody_is_an_error_at_the_deadline() -> None:
    manager = TrafficManager(
        store=None,
        pool=make_pool(LAYOUT, 2),
        device=None,
        layout=LAYOUT,
        listen=f"kvt-test-{os.getpid()}-alone",
    )
    with pytest.raises(PeerLost):
        manager.connect("kvt-test-nobody", 0.05)
    with pytest.raises(TransferTimeout):
        manager.wait_peer("nobody", 0.05)
