"""Workload: scatter of a 64-token Full Block layout from a pool to a paged cache and back.

Prints GB/s of PagedCache.scatter for pieces of 4 KiB to 256 KiB beside numpy's copy of the same bytes
in one piece (the limit of one core), interleaved; median and spread of 9 repeats.

    python bench/bench_copy.py
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from kvtransfer import BlockLayout, MemoryRegion, PagedCache, make_pool
from kvtransfer.layout import CacheLayer, CachePlane

BLOCKS, TOKENS, REPEATS = 64, 64, 9


def main() -> None:
    print(f"{'piece':>9}  {'scatter GB/s':>20}  {'numpy copy GB/s':>20}  share of limit")
    for width in (64, 256, 1024, 4096):
        layout = BlockLayout(4, TOKENS, [width, width])
        pool = make_pool(layout, BLOCKS)
        plane = BLOCKS * TOKENS * width
        region = MemoryRegion(4 * 2 * plane)
        planes = [CachePlane(0, width, width), CachePlane(plane, width, width)]
        layers = [CacheLayer(i * 2 * plane, TOKENS * width, planes) for i in range(4)]
        cache = PagedCache(region.num_bytes, TOKENS, BLOCKS, layers)
        pages = np.random.default_rng(0).permutation(BLOCKS).astype(np.int32)
        slots = pool.acquire(BLOCKS)
        assert slots is not None
        starts = pool.payload_offsets(slots)
        target = region.array()[: 8 * plane]
        source = np.ones(8 * plane, np.uint8)
        ours, limit = [], []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            moved = cache.scatter(layout, region, pool.region, pages, starts, 0, BLOCKS * TOKENS)
            ours.append(moved / (time.perf_counter() - begin) / 1e9)
            begin = time.perf_counter()
            np.copyto(target, source)
            limit.append(target.nbytes / (time.perf_counter() - begin) / 1e9)
        share = statistics.median(a / b for a, b in zip(ours, limit, strict=True))
        print(
            f"{width * TOKENS // 1024:6d} KiB  {spread(ours):>20}  {spread(limit):>20}  {share:.0%}"
        )


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


if __name__ == "__main__":
    main()
