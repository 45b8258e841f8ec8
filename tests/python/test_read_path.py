"""Which side reads a prefix, how much each, and when one takes the other's part over."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.scheduler import choose_side, split_decode_tokens, takes_over
from kvtransfer.scheduler.read_path import TAKE_OVER_FACTOR, TAKE_OVER_FLOOR_S, finish_s
from kvtransfer.scheduler.types import Disk


def test_the_shorter_disk_queue_reads_and_ties_go_to_the_side_that_read_less() -> None:
    assert choose_side(Disk(5), Disk(6)) == "pe"
    assert choose_side(Disk(6), Disk(2, 3)) == "de"
    assert choose_side(Disk(5, 0, 100), Disk(5, 0, 50)) == "de"
    assert choose_side(Disk(5, 0, 50), Disk(5, 0, 50)) == "pe"


disks = st.builds(
    Disk,
    st.integers(0, 100_000),
    st.integers(0, 1000),
    st.integers(0, 10),
    st.one_of(st.just(0.0), st.floats(10, 1e6)),
)


@given(
    st.integers(0, 100_000),
    st.integers(1, 512),
    disks,
    disks,
    st.one_of(st.just(math.inf), st.floats(100, 1e6)),
)
def test_a_split_is_never_predicted_to_be_later_than_the_better_side_and_is_the_best_one(
    hit: int, block: int, prefill: Disk, decode: Disk, network: float
) -> None:
    hit = hit // block * block
    tokens = split_decode_tokens(hit, block, prefill, decode, network)
    assert 0 <= tokens <= hit
    assert tokens % block == 0
    if prefill.tokens_per_s == 0 or decode.tokens_per_s == 0:
        network = math.inf
    chosen = finish_s(hit, tokens, prefill, decode, network)
    steps = range(0, hit + 1, max(hit // block // 50, 1) * block)
    best = min(finish_s(hit, other, prefill, decode, network) for other in steps)
    assert chosen <= best * (1 + 1e-9)


def test_equal_idle_sides_halve_and_a_fast_side_takes_its_share() -> None:
    assert split_decode_tokens(6400, 64, Disk(), Disk()) == 3200
    fast, slow = Disk(tokens_per_s=3000), Disk(tokens_per_s=1000)
    assert split_decode_tokens(6400, 64, fast, slow) == 1600
    assert split_decode_tokens(6400, 64, slow, fast) == 4800
    assert split_decode_tokens(6400, 64, Disk(100_000), Disk()) == 6400
    assert split_decode_tokens(6400, 64, Disk(), Disk(100_000)) == 0
    assert split_decode_tokens(64, 64, Disk(), Disk()) == 0, "one block can't be shared"
    assert split_decode_tokens(0, 64, Disk(), Disk()) == 0
    # Storage so fast that the PE's compute NIC decides: it must not carry more than half twice.
    near, far = Disk(tokens_per_s=1e6), Disk(5000, tokens_per_s=1e6)
    assert split_decode_tokens(6400, 64, near, far) == 704
    assert split_decode_tokens(6400, 64, near, far, 1000.0) == 3200


@given(
    st.integers(1, 10**6),
    st.integers(1, 10**6),
    st.floats(1e-4, 100),
    st.floats(1.0, 10.0),
    st.floats(0, 1),
)
def test_a_part_is_taken_over_only_when_that_is_at_least_twice_as_fast(
    tokens: int, other_tokens: int, other_s: float, later: float, done: float
) -> None:
    elapsed = other_s * later
    again = other_s * tokens / other_tokens
    if takes_over(tokens, other_tokens, other_s, elapsed, done):
        assert done == 0 or elapsed * (1 - done) / done > TAKE_OVER_FACTOR * again
        more = min(done + 0.1, 1.0)
        assert takes_over(tokens, other_tokens, other_s, elapsed, done * 0.9)
        if elapsed * (1 - more) / more <= TAKE_OVER_FACTOR * again:
            assert not takes_over(tokens, other_tokens, other_s, elapsed, more)
    assert not takes_over(tokens, other_tokens, other_s, elapsed, 1.0), "it is through"


def test_storage_that_is_slow_on_both_sides_moves_nothing() -> None:
    for factor in (1, 10, 1000):
        assert not takes_over(100, 100, 1.0 * factor, 1.1 * factor, 0.9)
    assert takes_over(100, 100, 1.0, 1.1, 0.1)
    assert not takes_over(100, 100, 0.001, 0.9 * TAKE_OVER_FLOOR_S, 0.6), "not for milliseconds"
    assert takes_over(100, 100, 0.001, 0.001, 0.0), "nothing of it has come: no end is in sight"
