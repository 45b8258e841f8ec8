"""What the replay computes from its turns, shows of them, and writes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from records import make_config, make_record, make_run
from rich.console import Console

from kvtransfer.cli.views import LiveView, per_turn_table, summary_table, turn_rows, verify_lines
from kvtransfer.engine.messages import Journal
from kvtransfer.engine.reference import OneShotDifference, VerifyReport
from kvtransfer.engine.replay import _Expected
from kvtransfer.engine.timeline import KINDS, TRACE_DTYPE, trace_events, write_trace


def render(item: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(item)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_overlap_is_one_minus_stall_over_load() -> None:
    assert make_record(load_s=0.4, stall_s=(0.1, 0.1)).overlap == pytest.approx(0.5)
    assert make_record(load_s=0.1, stall_s=(0.3,)).overlap == 0.0, "never below nothing"
    assert make_record(load_s=0.0, stall_s=(0.3,)).overlap == 1.0, "nothing was loaded"


def test_hidden_is_what_ran_under_the_other_over_the_turns_that_loaded() -> None:
    all_hidden = make_record(load_s=1.0, compute_s=(0.1,), exposed_s=0.0)
    none_hidden = make_record(load_s=1.0, compute_s=(0.1,), exposed_s=5.0)
    first_turn = make_record(load_s=0.0, compute_s=(9.0,), exposed_s=9.0)
    assert make_run(all_hidden).hidden == pytest.approx(1.0)
    assert make_run(none_hidden).hidden == pytest.approx(0.0)
    assert make_run(all_hidden, none_hidden, first_turn).hidden == pytest.approx(0.5)
    assert make_run(first_turn).hidden == 1.0


def test_hidden_is_bounded_by_the_smaller_of_load_and_compute() -> None:
    short_load = make_record(load_s=0.02, compute_s=(1.0,), exposed_s=0.98)
    assert make_run(short_load).hidden == pytest.approx(0.0)


def test_bytes_and_hits_are_summed_over_the_run() -> None:
    run = make_run(
        make_record(read_path="pe", pe_bytes=10, hit_blocks=1),
        make_record(read_path="split", pe_bytes=5, de_bytes=30, hit_blocks=2),
    )
    assert run.bytes_by_path() == {"pe": 15, "de": 30}
    assert run.records[1].loaded_bytes == 35
    assert run.hit_rate == pytest.approx(3 * 64 / 260)


def test_expected_hits_follow_the_finished_requests() -> None:
    expected = _Expected(4)
    prompt = np.arange(9, dtype=np.uint32)
    assert expected.hits(prompt) == 0
    expected.add(prompt)  # eight tokens have KV: two blocks
    assert expected.hits(np.arange(20, dtype=np.uint32)) == 2
    assert expected.hits(np.arange(9, dtype=np.uint32)) == 2
    assert expected.hits(np.arange(8, dtype=np.uint32)) == 1, "one token must be computed"
    assert expected.hits(np.array([0, 1, 2, 9, 4, 5, 6, 7, 8], np.uint32)) == 0


def test_the_tables_show_every_turn_and_the_speed_up() -> None:
    slow = make_run(make_record(turn=0), make_record(turn=1), path="pe")
    slow.wall_s = 8.0
    fast = make_run(make_record(read_path="de"), path="auto")
    text = render(summary_table([slow, fast], 0.25))
    assert "1.00x" in text
    assert "4.00x" in text
    assert "250 ms on one core" in text
    rows = render(per_turn_table(slow))
    assert rows.count("pe0>de0") == 2
    assert "0.50" in rows
    assert "-" in render(turn_rows("t", [make_record(load_s=0.0)]))


def test_the_summary_works_without_turns_that_loaded() -> None:
    assert "auto" in render(summary_table([make_run(make_record(load_s=0.0), path="auto")], None))


def test_the_live_view_prints_lines_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, "path pe", 2) as view:
        view.add(make_record())
        view.add(make_record(turn=1))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "starting engines" in text
    assert "2/2 turns" in text


def test_the_live_view_updates_a_table_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    with LiveView(console, "path pe", 20) as view:
        for turn in range(20):
            view.add(make_record(turn=turn))
    assert "20/20" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_verdict_names_what_differs() -> None:
    run = make_run(make_record(failures=("block 3 of 5: checksum",)), path="auto")
    report = VerifyReport(
        forwards=3,
        rows_checked=10,
        rows_different=[(7, 99)],
        tokens_checked=5,
        differences=[OneShotDifference("s", 2, 131, 5, 6, 0.7, 0.8)],
        wrong_hits=[("s", 1, 2, 3)],
    )
    text = "\n".join(verify_lines(run, report))
    assert "9/10 logits rows" in text
    assert "request 7: logits before position 99" in text
    assert "position 131: token 5, one-shot 6" in text
    assert "hit 2 blocks, the trace implies 3" in text
    assert "recovered from: block 3 of 5" in text
    assert not report.ok


def test_a_near_tie_is_reported_and_excused_a_sure_difference_is_not() -> None:
    tie = OneShotDifference("s", 0, 1, 5, 6, 1e-6, 0.5)
    sure = OneShotDifference("s", 0, 1, 5, 6, 0.5, 0.5)
    assert VerifyReport(differences=[tie]).ok
    assert not VerifyReport(differences=[sure]).ok
    assert VerifyReport(differences=[tie, sure]).real_differences == [sure]


def test_a_skipped_check_says_why() -> None:
    lines = verify_lines(make_run(make_record()), VerifyReport(skipped="no journal of pe0"))
    assert "skipped: no journal of pe0" in lines[0]


def journal(engine: str, begin: int) -> Journal:
    pieces = np.zeros(3, TRACE_DTYPE)
    pieces["begin_ns"] = begin + np.arange(3) * 1000
    pieces["end_ns"] = pieces["begin_ns"] + 500
    pieces["bytes"] = 4096
    pieces["layer"] = np.arange(3)
    pieces["kind"] = [0, 2, 4]
    spans = [("layer 0", 5, begin + 10, begin + 20), ("stall 1", 5, begin + 20, begin + 90)]
    return Journal(engine=engine, trace=pieces.tobytes(), spans=spans)


def test_the_timeline_has_a_track_per_engine_and_kind(tmp_path: Path) -> None:
    run = make_run(make_record())
    run.journals = {"pe0": journal("pe0", 1_000_000), "de0": journal("de0", 1_500_000)}
    events = trace_events(run)
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {("pe0", k) for k in (*KINDS, "compute", "stall")} <= names
    timed = [e for e in events if e["ph"] == "X"]
    assert len(timed) == 10
    assert min(e["ts"] for e in timed) == 0
    assert {e["name"] for e in timed} >= {
        "storage_read layer 0",
        "network_write layer 2",
        "layer 0",
    }
    pieces = [e for e in timed if "bytes" in e["args"]]
    assert all(e["dur"] == pytest.approx(0.5) for e in pieces)
    write_trace(run, tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == events


def test_a_run_without_journals_has_an_empty_timeline() -> None:
    assert trace_events(make_run(make_record())) == []


def test_the_configuration_names_its_engines_and_addresses() -> None:
    config = make_config(num_prefill=2, num_decode=3)
    assert config.prefill_engines == ["pe0", "pe1"]
    assert config.decode_engines == ["de0", "de1", "de2"]
    addresses = {config.control_address(e) for e in config.decode_engines}
    assert len({*addresses, config.scheduler_address}) == 4
    assert all(a.startswith("ipc://@") for a in addresses), "abstract: nothing in a file system"
    assert config.layout.num_layers == 4
    assert config.root_key == bytes(32)
    assert config.attention_time.fixed_s == config.time_fixed_s
