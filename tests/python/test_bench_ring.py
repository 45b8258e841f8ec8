"""kvtransfer bench ring: its options, its rows, and how it reads perftest's output."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtransfer.cli import bench_ring
from kvtransfer.cli.bench_ring import Row
from kvtransfer.cli.main import app
from kvtransfer.errors import InvalidArgument, Unsupported


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", "ring", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_null_and_shm_rows_have_costs_doorbells_and_their_limit(tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    options = ["--batch", "1,32", "--size", "65536", "--repeats", "2", "--seconds", "0.01"]
    output = run(*options, "--json", str(file))
    assert "memcpy" in output
    rows = {(r["transport"], r["batch"]): r for r in json.loads(file.read_text())}
    assert set(rows) == {("null", 1), ("null", 32), ("shm", 1), ("shm", 32)}
    for (transport, batch), row in rows.items():
        assert row["doorbells_per_request"] == pytest.approx(1 / batch)
        assert min(row["post_ns"]) > 0
        assert len(row["gb_per_s"]) == 2
        assert (row["limit"] == "memcpy") == (transport == "shm")
        assert len(row["limit_gb_per_s"]) == (2 if transport == "shm" else 0)


def test_limits_can_be_left_out(tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    run("--transport", "shm", "--batch", "4", "--size", "4096", "--repeats", "1",
        "--seconds", "0.01", "--no-limits", "--json", str(file))  # fmt: skip
    (row,) = json.loads(file.read_text())
    assert row["limit_gb_per_s"] == []


@pytest.mark.parametrize("wrong", ["", "x", "0", "-4", "1,,2", str(1 << 40)])
def test_numbers_that_make_no_sense_are_refused_by_name(wrong: str) -> None:
    with pytest.raises(InvalidArgument, match="--batch must be"):
        run("--batch", wrong)


def test_unknown_transports_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="null, shm, verbs"):
        run("--transport", "pigeon", "--size", "64", "--repeats", "1")


def test_verbs_without_a_device_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtransfer import transport

    monkeypatch.setattr(transport, "verbs_devices", lambda: ([], "no NIC in this machine"))
    with pytest.raises(Unsupported, match="no NIC in this machine"):
        run("--transport", "verbs")


def test_devices_are_the_first_two_active_or_those_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvtransfer import transport

    ports = [{"device": d, "state": s} for d, s in
             (("a", "down"), ("b", "active"), ("c", "active"), ("d", "active"))]  # fmt: skip
    monkeypatch.setattr(transport, "verbs_devices", lambda: (ports, ""))
    assert bench_ring._devices("") == ("b", "c")
    assert bench_ring._devices("x,y") == ("x", "y")
    assert bench_ring._devices("x") == ("x", "x")


def test_percentiles_come_from_all_batches() -> None:
    row = Row("null", 0, 1, post_ns=[float(i) for i in range(100)])
    assert row.percentile(0.5) == 50
    assert row.percentile(0.99) == 99
    assert row.percentile(1.0) == 99


def perftest(folder: Path, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program named ib_write_bw: silent as server, `client` as client."""
    program = folder / "ib_write_bw"
    program.write_text(f'#!/bin/sh\ncase "$*" in *127.0.0.1) {client};; *) sleep 30;; esac\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_perftest_s_average_is_read_in_gigabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = " #bytes iterations peak avg rate\\n 65536 1024 9.9 8.00 0.1"
    perftest(tmp_path, f"printf '{lines}\\n'", monkeypatch)
    assert bench_ring._ib_write_bw(Row("verbs", 65536, 32), ("a", "b")) == pytest.approx(1.0)


def test_perftest_without_a_result_is_an_error_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ring.time, "sleep", lambda _: None)
    perftest(tmp_path, "echo 'no route' >&2; exit 1", monkeypatch)
    with pytest.raises(Unsupported, match="no route"):
        bench_ring._ib_write_bw(Row("verbs", 4096, 1), ("a", "b"))


@pytest.mark.parametrize(("size", "batch"), [(4096, 1), (65536, 32), (1 << 20, 64), (1 << 26, 8)])
def test_both_sides_of_a_comparison_count_whole_batches(size: int, batch: int) -> None:
    count = bench_ring._peer_requests(Row("verbs", size, batch))
    assert count % batch == 0
    assert count >= 3 * batch
