"""The policy that looks further than the paper's: what each of its figures changes, and what not."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.scheduler import EngineReport, Limits, Request, Scheduler, choose_side
from kvtransfer.scheduler.aware import Speeds, aged, quicker_side
from kvtransfer.scheduler.types import Disk, EngineLoad

ENDLESS = Speeds(math.inf, math.inf)


def engine(name: str, disk: Disk, network: int = 0) -> EngineLoad:
    return EngineLoad(name, disk=disk, network_tokens=network)


def disk(queue: int = 0, rate: float = 1000.0) -> Disk:
    return Disk(queue, tokens_per_s=rate)


def side(pe: EngineLoad, de: EngineLoad, speeds: Speeds = ENDLESS, now: float = 0.0) -> str:
    return quicker_side(1000, pe, de, speeds, now)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_with_equal_disks_and_nothing_else_busy_it_is_the_paper_s_choice(
    pe_queue: int, de_queue: int, pe_total: int, de_total: int
) -> None:
    pe = Disk(pe_queue, total_tokens=pe_total, tokens_per_s=500.0)
    de = Disk(de_queue, total_tokens=de_total, tokens_per_s=500.0)
    assert side(engine("pe", pe), engine("de", de)) == choose_side(pe, de)


def test_disks_of_unknown_speed_are_the_paper_s_to_choose() -> None:
    assert side(engine("pe", disk(9, 0.0)), engine("de", disk(5, 10.0))) == "de"
    assert side(engine("pe", disk(5, 10.0)), engine("de", disk(9, 0.0))) == "pe"


def test_a_faster_disk_may_have_the_longer_queue() -> None:
    assert side(engine("pe", disk(3000, 4000.0)), engine("de", disk(1000, 1000.0))) == "pe"


def test_a_queue_shrinks_with_the_age_of_its_report() -> None:
    old = replace(disk(5000), reported_at_s=10.0)
    assert aged(old, 12.0).queue_tokens == 3000
    assert aged(old, 99.0).queue_tokens == 0
    assert aged(old, 9.0).queue_tokens == 5000, "a report from the future is as good as now"
    fresh = replace(disk(4000), reported_at_s=12.0)
    assert side(engine("pe", old), engine("de", fresh), now=12.0) == "pe"
    assert side(engine("pe", old), engine("de", fresh), now=10.0) == "de"


def test_what_was_assigned_since_the_report_doesn_t_age() -> None:
    old = replace(disk(0), unreported_tokens=700)
    assert aged(old, 1e9).queue_tokens == 700


def test_where_nics_are_slow_the_busier_one_is_spared() -> None:
    slow = Speeds(network=100.0, memory=math.inf)
    idle = disk(0, 1e9)
    assert side(engine("pe", idle), engine("de", idle), slow) == "de", "it reads once, not twice"
    assert side(engine("pe", idle), engine("de", idle, 5000), slow) == "pe"
    assert side(engine("pe", idle, 9000), engine("de", idle, 5000), slow) == "de"


def test_where_memory_is_slow_a_busy_de_isn_t_given_a_third_pass() -> None:
    slow = Speeds(network=math.inf, memory=1000.0)
    idle = disk(0, 1e9)
    busy = replace(idle, memory_tokens=50_000)
    assert side(engine("pe", idle), engine("de", busy), slow) == "pe"
    assert side(engine("pe", busy), engine("de", idle), slow) == "de"


def test_a_decode_group_with_a_long_disk_queue_comes_last() -> None:
    for balance, expected in (("paper", "de0"), ("aware", "de1")):
        scheduler = Scheduler(
            Limits(10_000, 10_000),
            "auto",
            balance=balance,  # type: ignore[arg-type]
        )
        scheduler.add_prefill(EngineReport("pe0", "p", "pe0"))
        for name, queue in (("de0", 500), ("de1", 0)):
            scheduler.add_decode(
                EngineReport(name, name, name, read_queue_tokens=queue, free_tokens=10**6)
            )
        scheduler.submit(Request(1, 100, 64, 10))
        assert scheduler.fetch()[0].decode == expected


def test_its_splits_reckon_with_the_age_of_reports() -> None:
    for balance, expected in (("paper", 0), ("aware", 640)):
        scheduler = Scheduler(
            Limits(10**6, 10**6),
            "split",
            balance=balance,  # type: ignore[arg-type]
        )
        common = {"read_tokens_per_s": 1000.0, "at_s": 0.0}
        scheduler.add_prefill(EngineReport("pe0", "p", "pe0", **common))  # type: ignore[arg-type]
        scheduler.add_decode(
            EngineReport(
                "de0",
                "d",
                "de0",
                read_queue_tokens=5000,
                free_tokens=10**6,
                **common,  # type: ignore[arg-type]
            )
        )
        scheduler.submit(Request(1, 1300, 1280))
        assert scheduler.fetch(now_s=5.0)[0].decode_tokens == expected
