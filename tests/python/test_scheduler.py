"""Properties of the paper's policy, and worked examples."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import InvalidArgument
from kvtransfer.scheduler import (
    AttentionTimeModel,
    EngineReport,
    Limits,
    PrefillWork,
    Request,
    Scheduler,
    assign_decode,
    assign_prefill,
    attention_pairs,
    choose_read_path,
    drain_global_queue,
    form_batch,
)
from kvtransfer.scheduler.decode import balance_bound

sizes = st.integers(1, 5000)
requests_of = st.lists(sizes, max_size=30).map(
    lambda lengths: [Request(i, n) for i, n in enumerate(lengths)]
)


def reports(
    kind: str, count: int, tokens: list[int], reads: list[int], free: list[int]
) -> list[EngineReport]:
    return [
        EngineReport(f"{kind}{i}", kind, f"n{i}", i, tokens[i], reads[i], free[i])
        for i in range(count)
    ]


@st.composite
def engines(draw: st.DrawFn, kind: str = "pe") -> list[EngineReport]:
    count = draw(st.integers(1, 6))
    numbers = st.lists(st.integers(0, 20_000), min_size=count, max_size=count)
    return reports(kind, count, draw(numbers), draw(numbers), draw(numbers))


# ---------------------------------------------------------------------------------- prefill


@given(requests_of, engines(), st.integers(0, 10_000), st.integers(0, 10_000))
def test_prefill_is_fifo_and_never_feeds_an_engine_above_beta(
    requests: list[Request], state: list[EngineReport], alpha: int, beta: int
) -> None:
    queue = deque(requests)
    assigned = assign_prefill(queue, state, Limits(alpha, beta))
    assert [r for r, _ in assigned] + list(queue) == requests
    tokens = {e.engine: e.unfinished_tokens for e in state}
    for request, name in assigned:
        assert tokens[name] <= beta
        tokens[name] += request.num_tokens
    if queue:
        assert all(t > beta for t in tokens.values()), "the fetch may only end when all are in C1"


@given(requests_of, engines(), st.integers(0, 10_000), st.integers(0, 30_000))
def test_prefill_prefers_short_disk_queues_and_then_few_tokens(
    requests: list[Request], state: list[EngineReport], alpha: int, beta: int
) -> None:
    assigned = assign_prefill(deque(requests), state, Limits(alpha, beta))
    now = {e.engine: e for e in state}
    for request, name in assigned:
        chosen = now[name]
        for other in now.values():
            if other.unfinished_tokens > beta:
                continue
            if chosen.read_queue_tokens > alpha:
                assert other.read_queue_tokens > alpha
            if (other.read_queue_tokens > alpha) == (chosen.read_queue_tokens > alpha):
                assert chosen.unfinished_tokens <= other.unfinished_tokens
        now[name] = chosen.with_request(request)


def test_the_paper_s_three_categories() -> None:
    limits = Limits(alpha=100, beta=1000)
    overloaded = EngineReport("c1", "g", "n", unfinished_tokens=1001)
    short = EngineReport("c2", "g", "n", unfinished_tokens=900, read_queue_tokens=100)
    long = EngineReport("c3", "g", "n", unfinished_tokens=0, read_queue_tokens=101)
    queue = deque([Request(1, 200), Request(2, 200)])
    assert [n for _, n in assign_prefill(queue, [overloaded, short, long], limits)] == ["c2", "c3"]


# ---------------------------------------------------------------------------------- decode


@given(requests_of, engines("de"))
def test_decode_respects_memory_order_and_z(
    requests: list[Request], state: list[EngineReport]
) -> None:
    queue = deque(requests)
    bound = balance_bound(requests, state)
    assigned = assign_decode(queue, state)
    assert [r for r, _ in assigned] + list(queue) == requests
    now = {e.engine: e for e in state}
    for request, name in assigned:
        chosen = now[name]
        assert chosen.free_tokens >= request.num_tokens
        roomy = [e for e in now.values() if e.free_tokens >= request.num_tokens]
        balanced = [e for e in roomy if e.unfinished_tokens + request.num_tokens <= bound]
        if balanced:
            assert chosen in balanced
            assert chosen.unfinished_requests == min(e.unfinished_requests for e in balanced)
        else:
            assert chosen.unfinished_tokens == min(e.unfinished_tokens for e in roomy)
        now[name] = chosen.with_request(request)
    if queue:
        assert all(e.free_tokens < queue[0].num_tokens for e in now.values())


def test_z_counts_the_prefix_that_fits_unfragmented_memory() -> None:
    state = reports("de", 2, [100, 300], [0, 0], [500, 500])
    queue = [Request(1, 600), Request(2, 300), Request(3, 200)]
    assert balance_bound(queue, state) == pytest.approx(1.05 * (900 + 400) / 2)


@given(requests_of, st.integers(1, 4))
def test_the_global_queue_is_drained_to_the_least_loaded_group(
    requests: list[Request], num_groups: int
) -> None:
    groups = {f"g{i}": reports(f"g{i}", 1, [i * 1000], [0], [0]) for i in range(num_groups)}
    private = {name: deque[Request]() for name in groups}
    queue = deque(requests)
    drain_global_queue(queue, groups, private)
    assert not queue
    placed = [r for waiting in private.values() for r in waiting]
    assert sorted(placed, key=lambda r: r.request_id) == requests
    if requests:
        assert requests[0] in private["g0"]


def test_without_a_group_the_global_queue_stays() -> None:
    queue = deque([Request(1, 10)])
    drain_global_queue(queue, {}, {})
    assert len(queue) == 1


# ---------------------------------------------------------------------------------- read path


def test_the_shorter_disk_queue_reads_and_ties_go_to_the_side_that_read_less() -> None:
    assert choose_read_path(5, 6) == "pe"
    assert choose_read_path(6, 5) == "de"
    assert choose_read_path(5, 5, 100, 50) == "de"
    assert choose_read_path(5, 5, 50, 50) == "pe"


# ---------------------------------------------------------------------------------- batches

works = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(1, 3000)), min_size=1, max_size=10
).map(lambda rows: [PrefillWork(i, c, n) for i, (c, n) in enumerate(rows)])


@given(works, st.floats(1e-4, 3.0), st.integers(1, 20_000))
def test_a_batch_keeps_the_quota_the_memory_and_the_order(
    queue: list[PrefillWork], quota: float, max_tokens: int
) -> None:
    model = AttentionTimeModel(1e-3, 1e-4, 1e-8)
    batch = form_batch(queue, model, quota, max_tokens)
    assert [b.request_id for b in batch] == list(range(len(batch)))
    assert sum(b.cached + b.new for b in batch) <= max_tokens
    for item, work in zip(batch, queue, strict=False):
        assert item.cached == work.cached
        assert 1 <= item.new <= work.remaining
        assert item.new == work.remaining or item is batch[-1], "only the last may be cut"
    step = max((model.increment(b.cached, 1) for b in batch), default=0)
    assert model.seconds([(b.cached, b.new) for b in batch]) <= max(quota, model.fixed_s + step) * (
        1 + 1e-9
    )
    if batch and batch[-1].new < queue[len(batch) - 1].remaining:
        cut = batch[-1]
        more = [(b.cached, b.new) for b in batch[:-1]] + [(cut.cached, cut.new + 1)]
        full = sum(c + n for c, n in more) > max_tokens
        assert full or model.seconds(more) > quota, "one token more must not have fitted"


def test_a_quota_below_one_token_still_makes_progress() -> None:
    batch = form_batch([PrefillWork(1, 100, 50)], AttentionTimeModel(1, 1, 1), 0.001, 10_000)
    assert [(b.request_id, b.new) for b in batch] == [(1, 1)]


def test_attention_pairs_is_the_sum_over_the_new_tokens() -> None:
    for cached, new in [(0, 1), (0, 7), (5, 3), (100, 40)]:
        assert attention_pairs(cached, new) == sum(cached + i + 1 for i in range(new))


@given(st.floats(0, 1e-2), st.floats(1e-6, 1e-3), st.floats(1e-10, 1e-7))
def test_the_fit_recovers_the_model_it_was_sampled_from(a: float, b: float, c: float) -> None:
    truth = AttentionTimeModel(a, b, c)
    shapes = [(0, 64), (0, 512), (1000, 64), (2000, 256), (4000, 16)]
    fit = AttentionTimeModel.fit([(k, n, truth.seconds([(k, n)])) for k, n in shapes])
    for cached, new in [(500, 100), (3000, 500)]:
        assert fit.seconds([(cached, new)]) == pytest.approx(
            truth.seconds([(cached, new)]), rel=1e-3
        )


def test_a_fit_has_no_negative_coefficient_and_needs_three_samples() -> None:
    fit = AttentionTimeModel.fit([(0, 10, 5.0), (0, 100, 4.0), (0, 1000, 3.0)])
    assert min(fit.fixed_s, fit.per_token_s, fit.per_pair_s) >= 0
    with pytest.raises(InvalidArgument, match="3 samples"):
        AttentionTimeModel.fit([(0, 1, 1.0)])


# ---------------------------------------------------------------------------------- the whole


def cluster(path: str = "auto", prefill: int = 2, decode: int = 2) -> Scheduler:
    scheduler = Scheduler(Limits(10_000, 10_000), path)  # type: ignore[arg-type]
    for i in range(prefill):
        scheduler.add_prefill(EngineReport(f"pe{i}", "prefill", f"p{i}"))
    for i in range(decode):
        scheduler.add_decode(EngineReport(f"de{i}", "decode", f"d{i}", free_tokens=10_000))
    return scheduler


steps = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 4000)),
        st.tuples(st.just("finish"), st.integers(0, 50)),
        st.tuples(st.just("lose"), st.integers(0, 3)),
        st.tuples(st.just("report"), st.integers(0, 3)),
        st.tuples(st.just("fetch"), st.just(0)),
    ),
    max_size=60,
)


@given(steps)
def test_no_request_is_lost_doubled_or_given_to_the_dead(script: list[tuple[str, int]]) -> None:
    def run() -> list[object]:
        scheduler = cluster()
        alive = {"pe0", "pe1", "de0", "de1"}
        running: dict[int, tuple[str, str]] = {}
        waiting: set[int] = set()
        log: list[object] = []
        for number, (verb, value) in enumerate(script):
            if verb == "submit":
                scheduler.submit(Request(number, value, value // 2, 10))
                waiting.add(number)
            elif verb == "finish" and running:
                done = sorted(running)[value % len(running)]
                running.pop(done)
                scheduler.finish(done)
            elif verb == "lose" and len(alive) > 2:
                name = sorted(alive)[value % len(alive)]
                if sum(n[0] == name[0] for n in alive) > 1:
                    alive.discard(name)
                    returned = {r.request_id for r in scheduler.engine_lost(name)}
                    hit = {i for i, pair in running.items() if name in pair}
                    assert hit <= returned
                    waiting |= returned
                    for i in hit:
                        running.pop(i)
            elif verb == "report":
                name = sorted(alive)[value % len(alive)]
                mine = [i for i, pair in running.items() if name in pair]
                scheduler.report(
                    EngineReport(
                        name,
                        "decode" if name[0] == "d" else "prefill",
                        name,
                        len(mine),
                        10 * len(mine),
                        0,
                        10_000 - 100 * len(mine),
                    ),
                    frozenset(mine),
                )
            elif verb == "fetch":
                for a in scheduler.fetch():
                    i = a.request.request_id
                    assert i in waiting
                    assert i not in running
                    assert {a.prefill, a.decode} <= alive
                    waiting.discard(i)
                    running[i] = (a.prefill, a.decode)
                    log.append((i, a.prefill, a.decode, a.read_path))
        return log

    assert run() == run(), "the same script must give the same assignments"


def test_forced_paths_are_kept_and_unknown_ones_refused() -> None:
    for path in ("pe", "de"):
        scheduler = cluster(path)
        for i in range(3):
            scheduler.submit(Request(i, 100, 50))
        assert {a.read_path for a in scheduler.fetch()} == {path}
    with pytest.raises(InvalidArgument, match="path"):
        cluster("sideways")


def test_auto_spreads_concurrent_loads_over_both_sides() -> None:
    scheduler = cluster("auto", 1, 1)
    for i in range(6):
        scheduler.submit(Request(i, 1000, 900, 10))
    paths = [a.read_path for a in scheduler.fetch()]
    assert paths == ["pe", "de", "pe", "de", "pe", "de"]


def test_a_report_that_has_not_seen_an_assignment_does_not_hide_its_reads() -> None:
    scheduler = cluster("auto", 1, 1)
    scheduler.submit(Request(1, 1000, 900))
    assert scheduler.fetch()[0].read_path == "pe"
    scheduler.report(EngineReport("pe0", "prefill", "p0"))  # sent before the assignment arrived
    scheduler.submit(Request(2, 1000, 100))
    assert scheduler.fetch()[0].read_path == "de"


def test_submitting_twice_and_unknown_engines_are_errors() -> None:
    scheduler = cluster()
    scheduler.submit(Request(1, 10))
    with pytest.raises(InvalidArgument, match="before"):
        scheduler.submit(Request(1, 10))
    with pytest.raises(InvalidArgument, match="unknown engine"):
        scheduler.report(EngineReport("xx", "g", "n"))


def test_a_request_that_ends_while_it_waits_is_forgotten_everywhere() -> None:
    scheduler = cluster(prefill=1, decode=1)
    scheduler.submit(Request(1, 100))
    scheduler.fetch()
    scheduler.engine_lost("pe0")  # queued again, with nowhere to go
    scheduler.finish(1)
    assert scheduler.waiting == 0
    scheduler.add_prefill(EngineReport("pe1", "prefill", "p1"))
    assert scheduler.fetch() == []
    scheduler.submit(Request(1, 100))  # its number may come again
    assert [a.prefill for a in scheduler.fetch()] == ["pe1"]


def test_requeue_gives_a_request_another_life_in_front_of_the_line() -> None:
    scheduler = cluster(prefill=1, decode=1)
    scheduler.submit(Request(1, 100))
    assert len(scheduler.fetch()) == 1
    scheduler.submit(Request(2, 100))
    scheduler.requeue(1)
    assert [a.request.request_id for a in scheduler.fetch()] == [1, 2]
    scheduler.requeue(99)  # unknown: nothing happens
    assert scheduler.fetch() == []


def test_losing_the_last_decode_group_returns_its_private_queue() -> None:
    scheduler = Scheduler(Limits(10_000, 10_000))
    scheduler.add_prefill(EngineReport("pe0", "prefill", "p0"))
    scheduler.add_decode(EngineReport("de0", "a", "d0", free_tokens=10))
    scheduler.submit(Request(1, 100))  # too large for de0: waits in its group's queue
    assert scheduler.fetch() == []
    scheduler.engine_lost("de0")
    scheduler.add_decode(EngineReport("de1", "b", "d1", free_tokens=1000))
    assert [(a.request.request_id, a.decode) for a in scheduler.fetch()] == [(1, "de1")]
    assert scheduler.engines == (["pe0"], ["de1"])
