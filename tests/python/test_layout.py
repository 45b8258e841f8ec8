"""The planner against numpy indexing, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import InvalidArgument, Mismatch
from kvtransfer.layout import BlockLayout, CacheLayer, CachePlane, PagedCache
from kvtransfer.memory import MemoryRegion, make_pool


@st.composite
def caches(draw: st.DrawFn) -> dict[str, object]:
    """A vLLM-like cache [layers, pages, planes, page_tokens, bytes] and a sequence in it."""
    layers = draw(st.integers(1, 3))
    planes = draw(st.integers(1, 4))
    width = draw(st.integers(1, 24))
    page_tokens = draw(st.sampled_from([1, 4, 8, 16, 32, 128]))
    block_tokens = draw(st.sampled_from([1, 8, 16, 64]))
    tokens = draw(st.integers(1, 200))
    used = -(-tokens // page_tokens)
    pages = draw(st.permutations(range(used + 2)))[:used]
    first = draw(st.integers(0, tokens - 1))
    count = draw(st.integers(0, tokens - first))
    token_major = draw(
        st.booleans()
    )  # NHD-like [page, token, plane] instead of [page, plane, token]
    return {
        "layers": layers,
        "planes": planes,
        "width": width,
        "page_tokens": page_tokens,
        "block_tokens": block_tokens,
        "tokens": tokens,
        "pages": pages,
        "num_pages": used + 2,
        "first": first,
        "count": count,
        "token_major": token_major,
    }


@given(caches())
def test_gather_and_scatter_equal_numpy_indexing(case: dict[str, object]) -> None:
    layers, planes, width = case["layers"], case["planes"], case["width"]
    page_tokens, block_tokens = case["page_tokens"], case["block_tokens"]
    pages, tokens = np.array(case["pages"]), case["tokens"]
    shape = (layers, case["num_pages"], planes, page_tokens, width)
    if case["token_major"]:
        shape = (layers, case["num_pages"], page_tokens, planes, width)
    region = MemoryRegion(int(np.prod(shape)))
    view = region.array()[: int(np.prod(shape))].reshape(shape)
    view[:] = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    logical = view.swapaxes(2, 3) if case["token_major"] else view
    page_stride = planes * page_tokens * width
    token_stride = planes * width if case["token_major"] else width
    plane_step = width if case["token_major"] else page_tokens * width
    cache = PagedCache(
        region.num_bytes,
        page_tokens,
        case["num_pages"],
        [
            CacheLayer(
                layer * case["num_pages"] * page_stride,
                page_stride,
                [CachePlane(p * plane_step, token_stride, width) for p in range(planes)],
            )
            for layer in range(layers)
        ],
    )
    layout = BlockLayout(layers, block_tokens, [width] * planes)
    blocks = -(-tokens // block_tokens)
    pool = make_pool(layout, blocks)
    slots = pool.acquire(blocks)
    first, count = case["first"], case["count"]
    moved = cache.gather(
        layout, region, pool.region, pages, pool.payload_offsets(slots), first, count
    )
    assert moved == count * layers * planes * width
    at = np.arange(first, first + count)
    # [layers, count, planes, width] as numpy indexes it
    wanted = logical[:, pages[at // page_tokens], :, at % page_tokens].swapaxes(0, 1)
    size = layout.full_block_bytes
    got = np.stack(
        [pool.region.array()[int(o) : int(o) + size] for o in pool.payload_offsets(slots)]
    ).reshape(blocks, layers, planes, block_tokens, width)
    picked = got[at // block_tokens, :, :, at % block_tokens].swapaxes(0, 1)
    np.testing.assert_array_equal(picked, wanted)
    before = view.copy()
    view[:] = 0
    cache.scatter(layout, region, pool.region, pages, pool.payload_offsets(slots), first, count)
    np.testing.assert_array_equal(
        logical[:, pages[at // page_tokens], :, at % page_tokens].swapaxes(0, 1), wanted
    )
    assert int((view != 0).sum()) <= int((before != 0).sum())


@given(caches())
def test_plans_cover_each_byte_once(case: dict[str, object]) -> None:
    width, page_tokens = case["width"], case["page_tokens"]
    cache = PagedCache(
        10**9,
        page_tokens,
        case["num_pages"],
        [CacheLayer(0, page_tokens * width, [CachePlane(0, width, width)])],
    )
    layout = BlockLayout(1, case["block_tokens"], [width])
    blocks = -(-case["tokens"] // case["block_tokens"])
    starts = np.arange(blocks, dtype=np.uint64) * np.uint64(layout.full_block_bytes)
    ranges = cache.plan(layout, 0, 0, np.array(case["pages"]), starts, case["first"], case["count"])
    assert ranges.shape == (len(ranges), 3)
    covered = np.concatenate(
        [np.arange(b, b + n) for _, b, n in ranges.tolist()] or [np.empty(0, int)]
    )
    begin = case["first"] * width
    np.testing.assert_array_equal(np.sort(covered), np.arange(begin, begin + case["count"] * width))


def test_errors_say_what_was_wrong() -> None:
    layout = BlockLayout(1, 16, [32])
    cache = PagedCache(4096, 16, 4, [CacheLayer(0, 512, [CachePlane(0, 32, 32)])])
    with pytest.raises(InvalidArgument, match=r"page id 9 outside 0\.\.3"):
        cache.plan(layout, 0, 0, np.array([9]), np.array([0]), 0, 4)
    with pytest.raises(Mismatch, match="planes"):
        cache.plan(BlockLayout(1, 16, [16, 16]), 0, 0, np.array([0]), np.array([0]), 0, 4)
    with pytest.raises(InvalidArgument, match="block_tokens"):
        BlockLayout(1, 0, [32])
    with pytest.raises(InvalidArgument, match="region"):
        PagedCache(100, 16, 4, [CacheLayer(0, 512, [CachePlane(0, 32, 32)])])
