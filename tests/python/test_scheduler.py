"""Properties of the paper's policy, and worked examples."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import InvalidArgument
from kvtransfer.scheduler import (
    Balance,
    DecodeGroups,
    Disk,
    EngineLoad,
    EngineReport,
    Limits,
    PrefillEngines,
    Request,
    Scheduler,
    assign_decode,
)
from kvtransfer.scheduler.decode import balance_bound
from kvtransfer.scheduler.order import Order

sizes = st.integers(1, 5000)
requests_of = st.lists(sizes, max_size=30).map(
    lambda lengths: [Request(i, n) for i, n in enumerate(lengths)]
)


def reports(
    kind: str, count: int, tokens: list[int], reads: list[int], free: list[int]
) -> list[EngineLoad]:
    return [
        EngineLoad.of(EngineReport(f"{kind}{i}", kind, f"n{i}", i, tokens[i], reads[i], free[i]))
        for i in range(count)
    ]


def assign_prefill(
    queue: deque[Request], state: list[EngineLoad], limits: Limits
) -> list[tuple[Request, str]]:
    """As a fetch does it: from the head until every engine is overloaded."""
    engines = PrefillEngines(limits)
    for engine in state:
        engines.changed(replace(engine))
    assigned = []
    while queue and (chosen := engines.assign(queue[0])) is not None:
        assigned.append((queue.popleft(), chosen.engine))
    return assigned


@st.composite
def engines(draw: st.DrawFn, kind: str = "pe") -> list[EngineLoad]:
    count = draw(st.integers(1, 6))
    numbers = st.lists(st.integers(0, 20_000), min_size=count, max_size=count)
    return reports(kind, count, draw(numbers), draw(numbers), draw(numbers))


# ---------------------------------------------------------------------------------- prefill


@given(requests_of, engines(), st.integers(0, 10_000), st.integers(0, 10_000))
def test_prefill_is_fifo_and_never_feeds_an_engine_above_beta(
    requests: list[Request], state: list[EngineLoad], alpha: int, beta: int
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
    requests: list[Request], state: list[EngineLoad], alpha: int, beta: int
) -> None:
    assigned = assign_prefill(deque(requests), state, Limits(alpha, beta))
    now = {e.engine: replace(e) for e in state}
    for request, name in assigned:
        chosen = now[name]
        for other in now.values():
            if other.unfinished_tokens > beta:
                continue
            if chosen.disk.queue_tokens > alpha:
                assert other.disk.queue_tokens > alpha
            if (other.disk.queue_tokens > alpha) == (chosen.disk.queue_tokens > alpha):
                assert chosen.unfinished_tokens <= other.unfinished_tokens
        chosen.take(request)


def test_the_paper_s_three_categories() -> None:
    limits = Limits(alpha=100, beta=1000)
    overloaded = EngineLoad("c1", unfinished_tokens=1001)
    short = EngineLoad("c2", unfinished_tokens=900, disk=Disk(100))
    long = EngineLoad("c3", unfinished_tokens=0, disk=Disk(101))
    queue = deque([Request(1, 200), Request(2, 200)])
    assert [n for _, n in assign_prefill(queue, [overloaded, short, long], limits)] == ["c2", "c3"]


# ---------------------------------------------------------------------------------- decode


@given(requests_of, engines("de"))
def test_decode_respects_memory_order_and_z(
    requests: list[Request], state: list[EngineLoad]
) -> None:
    queue = deque(requests)
    bound = balance_bound(requests, state)
    now = {e.engine: replace(e) for e in state}
    assigned = assign_decode(queue, state)
    assert [r for r, _ in assigned] + list(queue) == requests
    for request, engine in assigned:
        chosen = now[engine.engine]
        assert chosen.free_tokens >= request.num_tokens
        roomy = [e for e in now.values() if e.free_tokens >= request.num_tokens]
        balanced = [e for e in roomy if e.unfinished_tokens + request.num_tokens <= bound]
        if balanced:
            assert chosen in balanced
            assert chosen.unfinished_requests == min(e.unfinished_requests for e in balanced)
        else:
            assert chosen.unfinished_tokens == min(e.unfinished_tokens for e in roomy)
        chosen.take(request)
    assert now == {e.engine: e for e in state}
    if queue:
        assert all(e.free_tokens < queue[0].num_tokens for e in now.values())


def test_z_counts_the_prefix_that_fits_unfragmented_memory() -> None:
    state = reports("de", 2, [100, 300], [0, 0], [500, 500])
    queue = [Request(1, 600), Request(2, 300), Request(3, 200)]
    assert balance_bound(queue, state) == pytest.approx(1.05 * (900 + 400) / 2)


@given(requests_of, st.integers(1, 4))
def test_each_request_goes_to_the_least_loaded_group(
    requests: list[Request], num_groups: int
) -> None:
    groups = DecodeGroups()
    load = {f"g{i}": i * 1000 for i in range(num_groups)}
    for name, tokens in load.items():
        groups.add(name, EngineLoad(f"{name}-de", unfinished_tokens=tokens))
    for request in requests:
        placed = groups.place(request)
        assert placed is not None
        assert load[placed.name] == min(load.values())
        load[placed.name] += request.num_tokens
        assert placed.load == load[placed.name]
        groups.withdraw(request)
        assert groups.place(request) is placed, "withdrawing gives its load back"


def test_without_a_group_nothing_is_placed() -> None:
    assert DecodeGroups().place(Request(1, 10)) is None


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(-5, 5)), max_size=400),
)
def test_the_order_is_that_of_the_keys_now(changes: list[tuple[str, int]]) -> None:
    order = Order()
    keys: dict[str, int] = {}
    for name, key in changes:
        if key == -5:
            keys.pop(name, None)
            order.discard(name)
        else:
            keys[name] = key
            order.set(name, (key,))
        first = min(((k, n) for n, k in keys.items()), default=None)
        assert order.first() == (first and ((first[0],), first[1]))
        assert len(order) == len(keys)


# ---------------------------------------------------------------------------------- the whole


def cluster(
    path: str = "auto", prefill: int = 2, decode: int = 2, balance: Balance = "paper"
) -> Scheduler:
    scheduler = Scheduler(Limits(10_000, 10_000), path, balance=balance)  # type: ignore[arg-type]
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


@given(
    steps,
    st.sampled_from(["auto", "split", "pe"]),
    st.sampled_from(["paper", "aware", "round_robin", "least_tokens", "affinity"]),
)
def test_no_request_is_lost_doubled_or_given_to_the_dead(
    script: list[tuple[str, int]], path: str, balance: Balance
) -> None:
    def run() -> list[object]:
        scheduler = cluster(path, balance=balance)
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


def test_a_split_is_read_by_both_and_follows_the_measured_rates() -> None:
    scheduler = cluster("split", 1, 1)
    scheduler.submit(Request(1, 1300, 1280))
    (first,) = scheduler.fetch()
    assert (first.read_path, first.decode_tokens) == ("split", 640)
    scheduler.report(EngineReport("pe0", "prefill", "p0", read_tokens_per_s=300.0), frozenset({1}))
    scheduler.report(
        EngineReport("de0", "decode", "d0", free_tokens=10_000, read_tokens_per_s=100.0),
        frozenset({1}),
    )
    scheduler.submit(Request(2, 1300, 1280))
    (second,) = scheduler.fetch()
    assert (second.read_path, second.decode_tokens) == ("split", 320)
    scheduler.submit(Request(3, 100, 0))
    assert scheduler.fetch()[0].read_path in ("pe", "de")


@given(st.lists(st.tuples(st.integers(1, 3000), st.booleans()), max_size=40))
def test_what_is_believed_is_the_report_and_what_came_after_it(
    script: list[tuple[int, bool]],
) -> None:
    scheduler = cluster("auto", 1, 1)
    given_since: list[Request] = []
    for number, (tokens, reported) in enumerate(script):
        scheduler.submit(Request(number, tokens, tokens // 2))
        given_since += [a.request for a in scheduler.fetch()]
        if reported:
            seen = frozenset(r.request_id for r in given_since)
            scheduler.report(EngineReport("pe0", "prefill", "p0"), seen)
            given_since = []
        believed = scheduler._pe["pe0"].load
        waiting = list(scheduler._pe["pe0"].unreported.values())
        assert believed.unfinished_requests == len(waiting)
        assert believed.unfinished_tokens == sum(r.num_tokens for r, _ in waiting)
        assert believed.disk.unreported_tokens == sum(reads for _, reads in waiting)


@pytest.mark.parametrize("balance", ["round_robin", "least_tokens", "affinity"])
def test_baselines_do_what_their_names_say(balance: Balance) -> None:
    scheduler = cluster("pe", 3, 3, balance)
    for i in range(9):
        scheduler.submit(Request(i, 100 * (i + 1), session=i % 2))
    assigned = scheduler.fetch()
    both = cluster("auto", 1, 1, balance)
    for i in range(4):
        both.submit(Request(i, 1000 if i % 2 else 10, 8))
    turns = both.fetch()
    prefill = [a.prefill for a in assigned]
    decode = [a.decode for a in assigned]
    if balance == "round_robin":
        assert [a.read_path for a in turns] == ["pe", "de", "pe", "de"]
        assert prefill == ["pe0", "pe1", "pe2"] * 3
        assert decode == ["de0", "de1", "de2"] * 3
    elif balance == "affinity":
        assert prefill == ["pe0", "pe1"] * 4 + ["pe0"]
        assert decode == ["de0", "de1"] * 4 + ["de0"]
    else:
        loads = dict.fromkeys(["pe0", "pe1", "pe2"], 0)
        for assignment in assigned:
            assert loads[assignment.prefill] == min(loads.values())
            loads[assignment.prefill] += assignment.request.num_tokens
    with pytest.raises(InvalidArgument, match="balance"):
        cluster("pe", balance="guess")  # type: ignore[arg-type]


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
