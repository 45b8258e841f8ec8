"""Waiting for transfers in an asyncio engine: one event descriptor for everything.

Persists a few Full Blocks and loads them back layer by layer while the loop stays free. Run it with
`python examples/python/asyncio_engine.py`.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable

import numpy as np

from kvtransfer import BlockLayout, BlockStore, Namespace, TrafficManager, chain_keys, make_pool

LAYOUT = BlockLayout(num_layers=16, block_tokens=64, plane_bytes=[256, 256])


async def until(manager: TrafficManager, condition: Callable[[], bool]) -> None:
    """Sleeps on the manager's event descriptor until the condition holds."""
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(manager.event_fd(), changed.set)
    try:
        while True:
            manager.drain_events()  # before looking, never after
            changed.clear()
            if condition():
                return
            await changed.wait()
    finally:
        loop.remove_reader(manager.event_fd())


async def main() -> None:
    root = Namespace("demo", "1", "float16", LAYOUT).digest()
    keys = chain_keys(root, np.arange(8 * 64), 64)
    pool = make_pool(LAYOUT, 16)
    with tempfile.TemporaryDirectory() as folder:
        store = BlockStore(folder, root, LAYOUT)
        manager = TrafficManager(store=store, pool=pool, device=None, layout=LAYOUT)
        manager.set_cap("storage_read", 8_000_000)  # slow enough to watch
        slots = pool.acquire(8)
        assert slots is not None
        saved = manager.persist(keys=keys, parent=root, slots=slots)
        await until(manager, lambda: saved.done)
        print(f"{saved.blocks} blocks persisted")
        hit = store.lookup(keys, root)
        arrived = manager.make_stream(hit)
        load = manager.load(keys=keys, parent=root, slots=slots, parts=16, into=arrived)
        for layer in range(LAYOUT.num_layers):
            await until(manager, lambda layer=layer: arrived.ready(layer))  # type: ignore[misc]
            print(f"layer {layer:2d} of {hit} blocks is ready")
        await until(manager, lambda: load.done)
        print(f"{load.num_bytes / 1e6:.1f} MB in {load.seconds:.2f} s")


if __name__ == "__main__":
    asyncio.run(main())
