"""``kvtransfer bench store`` on a small scale, and a short soak of the store."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtransfer.cli.bench_store_peers import Meter

SOAK = Path(__file__).parents[2] / "bench" / "soak_store.py"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtransfer.cli.main", "bench", "store"]
    small = ["--folder", str(folder), "--pairs", "2", "--megabytes", "8", "--size", "256KiB"]
    return subprocess.run(
        [*command, *small, *arguments], capture_output=True, text=True, check=False, timeout=100
    )


def test_every_program_is_measured_in_both_directions(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    peers = "fio,plain" if shutil.which("fio") else "plain"
    done = run(tmp_path, "--peers", peers, "--json", str(out))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    found = {(row["mode"], row["program"]) for row in rows}
    ours = {("write", "kvtransfer"), ("read", "kvtransfer"), ("read", "no checksums")}
    assert found == ours | {(mode, p) for p in peers.split(",") for mode in ("read", "write")}
    for row in rows:
        assert len(row["samples"]) == 2
        assert all(sample["gb_per_s"] > 0 for sample in row["samples"])
    assert not [path for path in tmp_path.iterdir() if path != out], "it clears up after itself"


def test_bad_options_are_refused_by_name(tmp_path: Path) -> None:
    for bad in (("--size", "3MiB"), ("--mode", "seek"), ("--backend", "x"), ("--pairs", "0")):
        done = run(tmp_path, *bad)
        assert done.returncode == 2
        assert bad[0] in done.stderr


def test_only_what_is_measured_is_counted() -> None:
    meter = Meter()
    worked = []

    def measurement(files: int) -> None:
        for _ in range(50):
            Path("/dev/null").read_bytes()  # set-up
        seconds, _ = meter.measure(
            lambda: worked.extend(Path("/dev/null").read_bytes() for _ in range(files))
        )
        assert seconds > 0

    few, many = (meter.count_calls(lambda n=n: measurement(n)) for n in (10, 20))
    assert len(worked) == 30
    if few is None or many is None:
        pytest.skip("no strace that may attach")
    assert few < many < 2 * few + 50


def test_a_short_soak_passes() -> None:
    if not SOAK.exists():
        pytest.skip("the benches are not beside these tests")
    soak = subprocess.run(
        [sys.executable, str(SOAK), "--minutes", "0.08"],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert soak.returncode == 0, soak.stdout + soak.stderr
    assert soak.stdout.rstrip().endswith("passed")
