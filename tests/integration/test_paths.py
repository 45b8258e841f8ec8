"""Both loading paths end to end: right tokens, and bytes that go where the paper says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from clusters import make_config, make_sessions, serve_and_verify

from kvtransfer.engine.replay import ReplayRun

pytestmark = pytest.mark.integration


def traffic(run: ReplayRun, engine: str, kind: str) -> int:
    return int(run.journals[engine].counters["traffic"][kind]["bytes"])


def hit_bytes(run: ReplayRun) -> int:
    layout = run.config.layout
    return sum(r.hit_blocks for r in run.records) * layout.full_block_bytes


def new_bytes(run: ReplayRun, *, with_hits: bool) -> int:
    """KV bytes that a PE has to send to a DE."""
    tokens = sum(len(r.prompt) for r in run.records)
    if not with_hits:
        tokens -= sum(r.hit_blocks for r in run.records) * run.config.block_tokens
    return tokens * run.config.layout.bytes_per_token


def check(run: ReplayRun, report: Any) -> None:
    assert report.rows_checked > 0
    assert report.rows_different == []
    assert report.differences == []
    assert report.wrong_hits == []
    assert report.skipped == ""
    for journal in run.journals.values():
        pool = journal.counters["pool"]
        assert pool["available"] == pool["slots"], "every buffer went back to its pool"
        assert pool["bad_releases"] == 0


def test_pe_path_reads_each_hit_byte_once_and_pushes_everything(tmp_path: Path) -> None:
    run, report = serve_and_verify(make_config(tmp_path, path="pe"), make_sessions())
    check(run, report)
    assert hit_bytes(run) > 0
    assert traffic(run, "pe0", "storage_read") == hit_bytes(run)
    assert traffic(run, "de0", "storage_read") == 0
    assert traffic(run, "pe0", "device_copy") == hit_bytes(run)
    assert traffic(run, "pe0", "network_read") == 0
    assert traffic(run, "pe0", "network_write") == new_bytes(run, with_hits=True)
    counters = run.journals["pe0"].counters
    assert counters["arena_slots"] == 3, "one layer computing, one loading, one leaving"
    layers = run.config.layout.num_layers
    whole = counters["arena_peak_tokens"] * layers
    assert counters["arena_peak_tokens"] * counters["arena_slots"] <= 3 / layers * whole


def test_de_path_never_lands_a_hit_byte_in_pe_host_memory(tmp_path: Path) -> None:
    run, report = serve_and_verify(make_config(tmp_path, path="de"), make_sessions())
    check(run, report)
    assert traffic(run, "de0", "storage_read") == hit_bytes(run) > 0
    assert traffic(run, "pe0", "storage_read") == 0
    assert traffic(run, "pe0", "device_copy") == 0, "nothing came through the PE's pool"
    pool = run.journals["pe0"].counters["pool"]
    assert pool["low_watermark"] == pool["slots"], "no PE slot was ever taken"
    assert traffic(run, "pe0", "network_read") == hit_bytes(run)
    assert traffic(run, "pe0", "network_write") == new_bytes(run, with_hits=False)


def test_a_split_prefix_is_read_half_by_each_side_and_each_byte_once(tmp_path: Path) -> None:
    run, report = serve_and_verify(make_config(tmp_path, path="split"), make_sessions())
    check(run, report)
    sides = {"pe": traffic(run, "pe0", "storage_read"), "de": traffic(run, "de0", "storage_read")}
    assert sides == run.bytes_by_path()
    assert sum(sides.values()) == hit_bytes(run)
    split = [r for r in run.records if r.read_path == "split"]
    assert split
    assert all(r.pe_bytes > 0 and r.de_bytes > 0 for r in split)
    assert traffic(run, "pe0", "device_copy") == sides["pe"]
    assert traffic(run, "pe0", "network_read") == sides["de"]
    pushed = new_bytes(run, with_hits=False) + sides["pe"]
    assert traffic(run, "pe0", "network_write") == pushed, "the DE has its own part already"


def test_a_split_follows_what_the_sides_were_measured_to_read(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, path="split", storage_read_caps={"pe0": 8_000_000, "de0": 2_000_000}
    )
    run, report = serve_and_verify(config, make_sessions(count=1, turns=8, scale=8))
    check(run, report)
    late = [r for r in run.records if r.turn >= 4]
    share = sum(r.de_bytes for r in late) / sum(r.loaded_bytes for r in late)
    assert 0.08 < share < 0.35, "a fifth would be even"


def test_a_side_that_does_not_answer_in_time_is_replaced_by_the_other(tmp_path: Path) -> None:
    for slow, path in (("de0", "split"), ("pe0", "split"), ("pe0", "pe"), ("de0", "de")):
        config = make_config(
            tmp_path / f"{slow}-{path}", path=path, storage_read_caps={slow: 2_000}, deadline_s=4.0
        )
        run, report = serve_and_verify(config, make_sessions(count=1, turns=2))
        assert report.differences == []
        assert report.rows_different == []
        assert report.wrong_hits == [], "the other side restored the whole prefix"
        last = run.records[-1]
        assert last.attempts == 2
        assert last.failures
        assert (last.pe_bytes > 0) == (slow == "de0")
        assert (last.de_bytes > 0) == (slow == "pe0")


@pytest.mark.parametrize("slow", ["pe0", "de0"])
def test_a_side_that_turns_out_slow_leaves_its_part_to_the_other(tmp_path: Path, slow: str) -> None:
    """The first split halves: nothing is measured yet. The side that is through reads the other half
    and keeps its own; from then on the slow side is given little."""
    other = "de0" if slow == "pe0" else "pe0"
    caps = {slow: 40_000, other: 8_000_000}
    config = make_config(tmp_path, path="split", storage_read_caps=caps)
    run, report = serve_and_verify(config, make_sessions(count=1, turns=4))
    check(run, report)
    first = next(r for r in run.records if r.hit_blocks)
    assert first.attempts == 2
    assert "slow to read its part of a split" in first.failures[0]
    sides = {"pe0": first.pe_bytes, "de0": first.de_bytes}
    assert sides[other] == first.loaded_bytes == first.hit_blocks * config.layout.full_block_bytes
    later = [r for r in run.records if r.turn > first.turn]
    assert sum(r.loaded_bytes for r in later) > 0
    given = sum(r.pe_bytes if slow == "pe0" else r.de_bytes for r in later)
    assert given < 0.1 * sum(r.loaded_bytes for r in later)


@pytest.mark.parametrize("balance", ["paper", "aware"])
def test_auto_uses_both_sides_with_two_engines_of_each(tmp_path: Path, balance: str) -> None:
    config = make_config(tmp_path, path="auto", balance=balance, num_prefill=2, num_decode=2)
    run, report = serve_and_verify(config, make_sessions(count=3))
    check(run, report)
    assert min(run.bytes_by_path().values()) > 0
    assert {r.prefill for r in run.records} == {"pe0", "pe1"}
    assert {r.decode for r in run.records} == {"de0", "de1"}


@pytest.mark.parametrize("path", ["pe", "de", "split"])
def test_chunked_prefill_gives_the_same_tokens(tmp_path: Path, path: str) -> None:
    """A quota of a few dozen tokens cuts every prompt; later chunks read from the DE buffer."""
    config = make_config(tmp_path, path=path, quota_s=0.01, time_per_token_s=1e-4)
    run, report = serve_and_verify(config, make_sessions(turns=3))
    check(run, report)
    assert max(r.chunks for r in run.records) > 2
    assert traffic(run, "pe0", "network_read") > 0


def test_full_block_reads_and_bfloat16(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, path="auto", dtype="bfloat16", read_parts=1, layerwise=False, fsync=True
    )
    run, report = serve_and_verify(config, make_sessions(turns=3))
    assert report.rows_different == []
    assert report.wrong_hits == []
    assert run.hit_rate > 0.3


def test_a_second_run_finds_what_the_first_one_left(tmp_path: Path) -> None:
    sessions = make_sessions(count=1, turns=2)
    first, _ = serve_and_verify(make_config(tmp_path, path="pe"), sessions)
    second, _ = serve_and_verify(make_config(tmp_path, path="de", journal=False), sessions)
    for a, b in zip(first.records, second.records, strict=True):
        assert a.generated.tolist() == b.generated.tolist()
        assert b.hit_blocks == (len(b.prompt) - 1) // 64, "every full block of the prompt"
