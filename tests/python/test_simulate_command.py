"""``kvtransfer simulate``: sweeps, reports, and recorded runs predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.errors import InvalidArgument
from kvtransfer.sim.recorded import predict

KV_BYTES = 4 * 2 * 64  # a token's, of the run below
CAP = 1_000_000


def recorded(path: str, **changes: Any) -> dict[str, Any]:
    """A run of `replay --json`: one session, three turns, each computed in 1 ms a token."""
    turns = []
    for turn, (prompt, hit) in enumerate([(640, 0), (960, 640), (1280, 960)]):
        turns.append(
            {
                "session": 0,
                "turn": turn,
                "prompt": prompt,
                "hit_blocks": hit // 64,
                "generated": [1] * 5,
                "compute_s": [(prompt - hit) * 1e-3 / 4] * 4,
                "decode_s": 0.04,
                "ttft_s": hit * KV_BYTES / CAP + (prompt - hit) * 1e-3,
            }
        )
    config = {
        "model": "tiny",
        "storage_read_cap": CAP,
        "network_cap": 0,
        "block_tokens": 64,
        "layer_planes": [[64, 64]] * 4,
        "decode_tokens": 8192,
        "pool_blocks": 64,
        "num_prefill": 1,
        "num_decode": 1,
        "path": path,
        "quota_s": 10.0,
    }
    return {"config": {**config, **changes}, "records": turns}


@pytest.mark.parametrize(("path", "sides"), [("pe", 1), ("de", 1), ("split", 2)])
def test_a_recorded_run_is_predicted_from_its_caps_and_its_computing(path: str, sides: int) -> None:
    found = predict(recorded(path))
    assert [(p.session, p.turn) for p in found] == [(0, 1), (0, 2)]
    for prediction, hit in zip(found, (640, 960), strict=True):
        compute = 0.32
        wanted = hit * KV_BYTES / CAP / sides + compute
        assert prediction.simulated_s == pytest.approx(wanted, abs=0.04)
        if sides == 1:
            assert abs(prediction.error) < 0.08


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (recorded("pe", storage_read_cap=0), "no --storage-mbps"),
        ({"config": {}, "records": []}, "not a run"),
        ({}, "not a run"),
    ],
)
def test_what_is_no_recorded_run_is_refused(run: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        predict(run)


def test_the_command_predicts_files_of_runs(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([recorded("pe"), recorded("split")]))
    done = cli("--like", str(file))
    assert done.returncode == 0, done.stderr
    assert "split" in done.stdout
    for bad in ("[]", "{", "[3]"):
        file.write_text(bad)
        done = cli("--like", str(file))
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtransfer.cli.main", "simulate"]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, timeout=100
    )


def test_the_command_sweeps_and_reports(tmp_path: Path) -> None:
    toml = tmp_path / "small.toml"
    toml.write_text('model = "ds-27b"\n[agents]\nworkload = "32k"\ncount = 4\nmax_turns = 3\n')
    out, page = tmp_path / "r.json", tmp_path / "r.html"
    arguments = ["--sweep", "mode=basic,split", "--sweep", "decode=1,2", "--json", str(out)]
    has_plot = True
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        has_plot = False
    done = cli(str(toml), *arguments, *(["--html", str(page)] if has_plot else []))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [row["label"] for row in rows] == [
        "basic decode=1",
        "basic decode=2",
        "split decode=1",
        "split decode=2",
    ]
    assert {row["turns"] for row in rows} == {rows[0]["turns"]}
    if has_plot:
        text = page.read_text()
        assert text.count("data:image/png;base64,") == 3
        assert "http" not in text.replace("http-equiv", ""), "self-contained"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--sweep", "speed=1"], "no field 'speed'"),
        (["--sweep", "mode"], "FIELD=A,B"),
        (["--sweep", "prefill=few"], "prefill"),
        (["/nowhere.toml"], "nowhere.toml"),
        (["--seconds", "-1"], "--seconds"),
        (["--warm-up", "-1"], "--warm-up"),
    ],
)
def test_bad_commands_are_refused(arguments: list[str], why: str) -> None:
    done = cli(*arguments)
    assert done.returncode == 2, done.stdout
    assert why in " ".join(done.stderr.split())
