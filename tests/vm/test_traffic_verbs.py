"""The traffic manager over verbs from Python: classes, attributes, the NIC's copies, new epochs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from kvtransfer.errors import Mismatch, PeerLost
from kvtransfer.layout import BlockLayout, CacheLayer, CachePlane, PagedCache
from kvtransfer.memory import BufferPool, MemoryRegion, make_pool
from kvtransfer.transport import TrafficManager, VerbsDomain, VerbsOptions, verbs_devices

LAYERS, PAGE, BYTES = 4, 16, 256
LAYOUT = BlockLayout(LAYERS, PAGE, [BYTES])
PAGES = np.array([2, 0, 1], np.int32)
TOKENS = 40  # two blocks and a half


class Engine:
    """A manager with a pool of 8 slots and a paged device cache of all layers."""

    def __init__(self, name: str, device: str, **options: Any) -> None:
        self.pool: BufferPool = make_pool(LAYOUT, 8)
        self.device = MemoryRegion(LAYERS * 4 * PAGE * BYTES)
        layers = [
            CacheLayer(i * 4 * PAGE * BYTES, PAGE * BYTES, [CachePlane(0, BYTES, BYTES)])
            for i in range(LAYERS)
        ]
        self.cache = PagedCache(self.device.num_bytes, PAGE, 4, layers)
        verbs = options.pop("verbs", {})
        self.manager = TrafficManager(
            store=None,
            pool=self.pool,
            device=self.device,
            layout=LAYOUT,
            name=name,
            listen=f"kvt-vm-{name}",
            transport="verbs",
            verbs=VerbsOptions(device=device, **verbs),
            **options,
        )

    def slots(self, count: int) -> np.ndarray[Any, Any]:
        slots = self.pool.acquire(count)
        assert slots is not None
        return slots

    def token(self, layer: int, token: int) -> np.ndarray[Any, Any]:
        start = layer * 4 * PAGE * BYTES + int(PAGES[token // PAGE]) * PAGE * BYTES
        at = start + token % PAGE * BYTES
        return self.device.array()[at : at + BYTES]


def move(engine: Engine, starts: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        "cache": engine.cache,
        "pages": PAGES,
        "block_starts": starts,
        "first_token": 0,
        "num_tokens": TOKENS,
        "timeout_s": 30.0,
    }


def test_both_classes_move_bytes_and_are_counted_apart() -> None:
    classes = {"kv_class": (0, 104), "model_class": (0, 184)}
    pe = Engine("pe", "rxe0", verbs=classes)
    de = Engine("de", "rxe1", verbs=classes)
    peer = pe.manager.connect("kvt-vm-de", 10.0)
    kv, model = pe.manager.peer_attributes(peer)
    assert (kv["class"], kv["traffic_class"]) == ("kv", "104")
    assert (model["class"], model["traffic_class"]) == ("model", "184")
    assert kv["device"] == "rxe0"
    assert kv["state"] == model["state"] == "RTS"
    rng = np.random.default_rng(1)
    pe.device.array()[:] = rng.integers(0, 256, pe.device.num_bytes, np.uint8)
    for name in ("kv", "model"):
        slots = de.slots(3)
        starts = de.pool.payload_offsets(slots)
        arrived = de.manager.make_stream(1)
        tag = de.manager.open_receive(arrived)
        ticket = pe.manager.push(**move(pe, starts), peer=peer, tag=tag, traffic_class=name)
        for layer in range(LAYERS):
            arrived.wait(layer, 20.0)
        assert ticket.wait(20.0)
        ticket.check()
        memory = de.pool.region.array()
        for layer in range(LAYERS):
            for token in range(TOKENS):
                at = int(starts[token // PAGE]) + LAYOUT.layer_offset(layer)
                at += token % PAGE * BYTES
                assert np.array_equal(memory[at : at + BYTES], pe.token(layer, token))
        de.pool.release(slots)
    moved = LAYERS * TOKENS * BYTES
    time.sleep(0.05)  # totals are gathered once a round of the progress loop
    assert pe.manager.ring_counters("kv")["write_bytes"] == moved
    assert pe.manager.ring_counters("model")["write_bytes"] == moved
    assert sum(pe.manager.hardware_counters().values()) > 0


def test_staging_through_the_nic_brings_the_same_bytes_as_the_cpu() -> None:
    seen = []
    for copy in ("cpu", "nic"):
        engine = Engine(f"copy-{copy}", "rxe0", copy=copy)
        slots = engine.slots(3)
        rng = np.random.default_rng(7)
        engine.pool.region.array()[:] = rng.integers(0, 256, engine.pool.region.num_bytes, np.uint8)
        engine.device.array()[:] = 0
        staged = engine.manager.make_stream(1)
        ticket = engine.manager.stage(
            **move(engine, engine.pool.payload_offsets(slots)), slots=slots, into=staged
        )
        assert ticket.wait(30.0)
        ticket.check()
        assert all(staged.ready(layer) for layer in range(LAYERS))
        assert engine.manager.counters()["device_copy"]["bytes"] == LAYERS * TOKENS * BYTES
        seen.append(engine.device.array().copy())
        engine.pool.release(slots)
        assert engine.pool.available == engine.pool.num_slots
    assert np.array_equal(*seen)
    assert seen[0].any()


def test_a_peer_that_comes_back_is_a_new_one_and_the_old_is_lost() -> None:
    pe = Engine("pe2", "rxe0")
    de = Engine("de2", "rxe1", epoch=1)
    first = pe.manager.connect("kvt-vm-de2", 10.0)
    assert pe.manager.peer_alive(first)
    del de
    deadline = time.monotonic() + 10
    while pe.manager.peer_alive(first) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not pe.manager.peer_alive(first)
    starts = np.array([4096, 8192, 16384], np.uint64)
    ticket = pe.manager.push(**move(pe, starts), peer=first)
    assert ticket.wait(10.0)
    with pytest.raises(PeerLost):
        ticket.check()
    de = Engine("de2", "rxe1", epoch=2)
    second = pe.manager.connect("kvt-vm-de2", 10.0)
    assert second != first
    slots = de.slots(3)
    arrived = de.manager.make_stream(1)
    tag = de.manager.open_receive(arrived)
    ticket = pe.manager.push(**move(pe, de.pool.payload_offsets(slots)), peer=second, tag=tag)
    for layer in range(LAYERS):
        arrived.wait(layer, 20.0)
    assert ticket.wait(10.0)
    ticket.check()


def test_peers_of_another_shape_are_refused_with_both_shapes() -> None:
    one = Engine("one", "rxe0")
    two = Engine("two", "rxe1", verbs={"queue_pairs": 2})
    with pytest.raises(Mismatch, match="offers 2 queue pairs of class kv, we have 1"):
        one.manager.connect("kvt-vm-two", 5.0)
    assert two.pool.available == 8


def test_devices_are_listed_with_ports_and_gids() -> None:
    ports, why = verbs_devices()
    assert why == ""
    assert [p["device"] for p in ports] == ["rxe0", "rxe1"]
    for port in ports:
        assert port["state"] == "active"
        assert port["link_layer"] == "Ethernet"
        assert any(g["type"] == "RoCE v2" and "10.77.0" in g["gid"] for g in port["gids"])


def test_a_blob_travels_over_any_channel_and_damage_is_noticed() -> None:
    here = VerbsDomain(options=VerbsOptions(device="rxe0"), regions=[MemoryRegion(4096)])
    there = VerbsDomain(options=VerbsOptions(device="rxe1"), regions=[MemoryRegion(4096)])
    mine, yours = here.make_endpoint(name="mine"), there.make_endpoint(name="yours", epoch=9)
    damaged = bytearray(yours.blob())
    damaged[60] ^= 1
    with pytest.raises(Mismatch, match="checksum"):
        mine.connect(bytes(damaged))
    ring = mine.connect(yours.blob())
    assert (ring.peer, ring.peer_epoch) == ("yours", 9)
    assert ring.attributes["backend"] == "verbs"
