"""Adaptive spin: time and CPU of single pushes of one small layer between two engines over verbs.

Workload: 200 pushes, one after another, each waited for; the progress threads look again for at most
`spin_us` before they sleep. Interleaved repeats; prints median (min-max) microseconds a push and CPU
microseconds of the whole process a push. Needs a verbs device (tests/vm/run.sh has two).
"""

from __future__ import annotations

import resource
import statistics
import time

import numpy as np

from kvtransfer.layout import BlockLayout, CacheLayer, CachePlane, PagedCache
from kvtransfer.memory import MemoryRegion, make_pool
from kvtransfer.transport import TrafficManager, VerbsOptions, verbs_devices

PUSHES, REPEATS = 200, 5
SPINS_US = (0, 20, 200)
LAYOUT = BlockLayout(1, 16, [256])


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def engine(name: str, device: str, spin_us: int) -> TrafficManager:
    return TrafficManager(
        store=None,
        pool=make_pool(LAYOUT, 4),
        device=MemoryRegion(1 << 16),
        layout=LAYOUT,
        name=name,
        listen=f"bench-spin-{name}",
        transport="verbs",
        verbs=VerbsOptions(device=device),
        spin_us=spin_us,
    )


def measure(spin_us: int, devices: list[str]) -> tuple[float, float]:
    here, there = engine("here", devices[0], spin_us), engine("there", devices[-1], spin_us)
    peer = here.connect("bench-spin-there", 10.0)
    cache = PagedCache(1 << 16, 16, 8, [CacheLayer(0, 16 * 256, [CachePlane(0, 256, 256)])])
    begin, used = time.perf_counter(), cpu_s()
    for _ in range(PUSHES):
        arrived = there.make_stream(1)
        tag = there.open_receive(arrived)
        ticket = here.push(
            cache=cache,
            pages=np.array([0], np.int32),
            block_starts=np.array([4096], np.uint64),
            first_token=0,
            num_tokens=16,
            peer=peer,
            tag=tag,
            timeout_s=20.0,
        )
        arrived.wait(0, 20.0)
        ticket.wait(20.0)
        there.close_receive(tag)
    wall = (time.perf_counter() - begin) / PUSHES
    return wall * 1e6, (cpu_s() - used) / PUSHES * 1e6


def main() -> None:
    devices = [p["device"] for p in verbs_devices()[0]]
    rows: dict[int, list[tuple[float, float]]] = {spin: [] for spin in SPINS_US}
    for _ in range(REPEATS):
        for spin in SPINS_US:
            rows[spin].append(measure(spin, devices))
    for spin, values in rows.items():
        walls, cpus = zip(*values, strict=True)
        print(
            f"spin {spin:3d} us: {statistics.median(walls):7.0f} us a push "
            f"({min(walls):.0f}-{max(walls):.0f}), {statistics.median(cpus):7.0f} us CPU"
        )


if __name__ == "__main__":
    main()
