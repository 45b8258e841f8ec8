"""The command line: bad input is one line and a non-zero exit code; good input is a table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration


def kvtransfer(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtransfer.cli.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "/nonexistent.jsonl"], "No such file"),
        (["replay", "--path", "sideways"], "--path must be"),
        (["replay", "--transport", "pigeon"], "--transport must be"),
        (["replay", "--model", "gpt-9"], "unknown model"),
        (["replay", "--dtype", "int4"], "dtype"),
        (["replay", "--turns", "0"], "--turns must be positive"),
        (["replay", "--prefill", "0"], "num_prefill must be"),
        (["replay", "--prefill", "100000"], "num_prefill must be"),
        (["replay", "--block-tokens", "0"], "--block-tokens must be"),
        (["replay", "--storage-mbps", "-3"], "--storage-mbps must not"),
        (["replay", "--pool-blocks", "-1"], "--pool-blocks must be positive"),
        (["replay", "--store", "/proc/nope"], "/proc/nope"),
        (["replay", "--profile", "/nonexistent"], "not a profile"),
        (["workload", "stats", "/nonexistent"], "No such file"),
        (["workload", "generated", "7k"], "spec must be"),
        (["plot", "/nonexistent"], "not a trace"),
    ],
)
def test_bad_input_is_one_line_and_a_failure(arguments: list[str], message: str) -> None:
    done = kvtransfer(*arguments)
    assert done.returncode != 0
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kvtransfer: error: ")
    assert message in lines[0]
    assert "Traceback" not in done.stdout + done.stderr


def test_a_malformed_trace_line_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"schema":"kvt-sessions-v1","block_size":64}\n{"id":"x","turns":[{"in":5}]}\n')
    done = kvtransfer("replay", str(bad))
    assert done.returncode == 2
    assert f"{bad}: line 2" in done.stderr


def test_replay_writes_its_table_json_trace_and_picture(tmp_path: Path) -> None:
    record, trace = tmp_path / "run.json", tmp_path / "trace.json"
    done = kvtransfer(
        "replay", "--turns", "2", "--scale", "32", "--storage-mbps", "50", "--verify", "--table",
        "--json", str(record), "--trace", str(trace),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified" in done.stdout
    assert "speed-up" in done.stdout
    runs = json.loads(record.read_text())
    assert [run["config"]["path"] for run in runs] == ["pe", "auto"]
    assert all(len(run["records"]) == 4 for run in runs)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {"pe0", "de0"}
    assert any(e["name"].startswith("layer") for e in events)
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
    pytest.importorskip("matplotlib")
    picture = kvtransfer("plot", str(trace))
    assert picture.returncode == 0
    assert (tmp_path / "trace.png").stat().st_size > 5000


def test_workload_commands_print_their_tables(data_dir: Path) -> None:
    file = data_dir / "weka_claude_code" / "ctx64k_30.jsonl"
    done = kvtransfer("workload", "stats", str(file))
    assert done.returncode == 0
    assert "2209" in done.stdout
    done = kvtransfer("workload", "generated", "48k", "--count", "200")
    assert done.returncode == 0


def test_profile_fits_the_time_model(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    done = kvtransfer("profile", "--json", str(out))
    assert done.returncode == 0, done.stderr
    fit = json.loads(out.read_text())
    assert fit["time_per_token_s"] > 0
    assert fit["beta"] > 0
