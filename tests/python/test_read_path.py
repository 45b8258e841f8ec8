"""Which side reads a prefix, how much each, and when one takes the other's part over."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.scheduler import Progress, choose_side, split_decode_tokens, takes_over
from kvtransfer.scheduler.read_path import TAKE_OVER_FACTOR, finish_s
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


def seen(layers: int, tokens: int, times: list[float], now: float) -> Progress:
    """A side whose layers come at ``times``, looked at just after each and at ``now``."""
    progress = Progress(layers, tokens)
    for ready, time in enumerate(times, start=1):
        if time <= now:
            progress.see(ready, time)
    progress.see(sum(time <= now for time in times), now)
    return progress


def even(layers: int, wait: float, seconds: float) -> list[float]:
    """Times of layers that come evenly, over ``seconds``, after ``wait``."""
    return [wait + seconds * (i + 1) / layers for i in range(layers)]


@given(
    st.integers(2, 64),
    st.tuples(st.floats(0, 20), st.floats(0.01, 20), st.integers(64, 10**5)),
    st.tuples(st.floats(0, 20), st.floats(0.01, 200), st.integers(64, 10**5)),
    st.floats(0, 1),
)
def test_taking_a_part_over_is_at_least_twice_as_fast_as_waiting_for_it(
    layers: int, fast: tuple[float, float, int], slow: tuple[float, float, int], when: float
) -> None:
    """Sides deliver evenly after having waited behind others; whenever one looks."""
    (fast_wait, fast_s, fast_tokens), (slow_wait, slow_s, slow_tokens) = fast, slow
    end = slow_wait + slow_s
    now = fast_wait + fast_s + when * max(end - fast_wait - fast_s, 0)
    one = seen(layers, fast_tokens, even(layers, fast_wait, fast_s), now)
    other = seen(layers, slow_tokens, even(layers, slow_wait, slow_s), now)
    if takes_over(one, other):
        assert one.through
        assert 0 < other.ready < layers
        again = fast_s * slow_tokens / fast_tokens
        assert end - now > 0.5 * TAKE_OVER_FACTOR * again
    assert not takes_over(other, other)
    assert not (takes_over(one, other) and takes_over(other, one))


@given(st.integers(2, 64), st.floats(0.01, 10), st.floats(1, 1000), st.floats(1.0, 1.5))
def test_storage_that_is_slow_on_both_sides_moves_nothing(
    layers: int, seconds: float, factor: float, later: float
) -> None:
    one = even(layers, 0, seconds * factor)
    other = even(layers, 0, seconds * factor * later)
    for now in (one[-1], (one[-1] + other[-1]) / 2):
        assert not takes_over(seen(layers, 640, one, now), seen(layers, 640, other, now))


def test_a_side_that_has_not_begun_is_waited_for_and_one_that_crawls_is_not() -> None:
    fast = seen(4, 640, even(4, 0, 1.0), 5.0)
    assert not takes_over(fast, seen(4, 640, even(4, 100, 1.0), 50.0)), "it stands in a queue"
    assert takes_over(fast, seen(4, 640, even(4, 0, 20.0), 9.0))
    many = seen(40, 640, even(40, 0, 1.0), 19.0)
    assert not takes_over(many, seen(40, 640, even(40, 0, 20.0), 19.0)), "it is nearly through"
    quick = seen(4, 640, even(4, 0, 1e-3), 0.01)
    assert not takes_over(quick, seen(4, 640, even(4, 0, 0.05), 0.03)), "not for milliseconds"
    queued = seen(4, 640, even(4, 30.0, 1.0), 40.0)
    assert not takes_over(queued, seen(4, 640, even(4, 25.0, 20.0), 40.0)), "it would wait again"


def test_progress_keeps_when_its_last_layer_came() -> None:
    progress = seen(4, 640, even(4, 1.0, 2.0), 99.0)
    assert progress.through
    assert (progress.first_s, progress.last_s) == (1.5, 3.0)
    assert progress.layer_s == 0.5
    assert seen(4, 640, even(4, 1.0, 2.0), 2.2).layer_s == (2.2 - 1.5) / 2
    assert seen(4, 640, even(4, 1.0, 2.0), 0.2).layer_s == 0.2
