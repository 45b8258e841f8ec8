"""The plan of a block size against sessions counted token by token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.analysis import (
    ADAPTIVE,
    DeviceCurve,
    adaptive_block_tokens,
    hit_tokens,
    plan_block_size,
)
from kvtransfer.errors import InvalidArgument
from kvtransfer.workload import TraceSession, TraceTurn

FLAT = DeviceCurve((1,), (1.0,))


def growing(lengths: list[int], block_tokens: int = 64) -> TraceSession:
    """A session whose every prompt goes on with all of the prompt before it."""
    turns = tuple(
        TraceTurn(np.arange(length // block_tokens, dtype=np.int64), length, 0)
        for length in lengths
    )
    return TraceSession("s", block_tokens, turns)


@given(
    appends=st.lists(st.integers(1, 500), min_size=1, max_size=12),
    size=st.sampled_from([16, 32, 64, 128, 256, 512]),
)
def test_a_growing_session_hits_all_whole_blocks_of_the_prompt_before(
    appends: list[int], size: int
) -> None:
    lengths = np.cumsum(appends).tolist()
    hits = hit_tokens(growing(lengths), size)
    wanted = [0, *(n // size * size for n in lengths[:-1])]
    # A prompt's last token is always computed: its logits are wanted.
    assert hits.tolist() == [
        min(w, (n - 1) // size * size) for w, n in zip(wanted, lengths, strict=True)
    ]


@given(appends=st.lists(st.integers(1, 3000), min_size=2, max_size=10))
def test_larger_blocks_never_hit_more(appends: list[int]) -> None:
    session = growing(np.cumsum(appends).tolist())
    totals = [hit_tokens(session, size).sum() for size in (16, 32, 64, 128, 256, 512)]
    assert totals == sorted(totals, reverse=True)


def test_a_prompt_that_leaves_the_old_one_shares_whole_trace_blocks_only() -> None:
    first = TraceTurn(np.arange(10), 640, 0)
    second = TraceTurn(np.array([0, 1, 2, 99, 98]), 320, 0)
    hits = hit_tokens(TraceSession("s", 64, (first, second)), 64)
    assert hits.tolist() == [0, 192]


def test_the_adaptive_rule_starts_over_where_the_size_changes() -> None:
    assert [adaptive_block_tokens(n) for n in (1, 16383, 16384, 65535, 65536)] == [
        *(64, 64, 128, 128, 256)
    ]
    hits = hit_tokens(growing([10_000, 12_000, 20_000, 22_000]), ADAPTIVE)
    assert hits[1] > 0
    assert hits[2] == 0
    assert hits[3] == 20_000 // 128 * 128


def test_time_follows_hits_bytes_and_the_devices_curve() -> None:
    device = DeviceCurve((1 << 10, 1 << 20), (1.0, 2.0))
    session = growing([6400, 6400 + 64])
    small, large = plan_block_size([session], [64, 6400], 1000, device, 100.0)
    assert small.hit_rate == pytest.approx(6400 / (6400 + 6464))
    assert large.hit_rate == small.hit_rate
    assert large.load_s < small.load_s
    assert small.compute_s == pytest.approx((6400 + 64) / 2 / 100)
    assert small.load_s == pytest.approx(6400 * 1000 / 2 / (device.at(64_000) * 1e9))
    assert device.at(1 << 30) == 2.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: DeviceCurve((2, 1), (1.0, 1.0)),
        lambda: DeviceCurve((), ()),
        lambda: DeviceCurve((1,), (0.0,)),
        lambda: plan_block_size([], [64], 1, FLAT, 1.0),
        lambda: plan_block_size([growing([64])], [-1], 1, FLAT, 1.0),
        lambda: plan_block_size([growing([64])], [64], 0, FLAT, 1.0),
    ],
)
def test_what_makes_no_sense_is_refused(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidArgument):
        call()


def test_the_command_compares_sizes_and_names_the_best(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    turns = [
        {"in": 640 * n, "out": 64, "k": 10 * (n - 1), "h": [[10 * (n - 1), 10]]} for n in (1, 2, 3)
    ]
    trace.write_text(
        '{"schema":"kvt-sessions-v1","block_size":64}\n' + json.dumps({"id": "a", "turns": turns})
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvtransfer.cli.main", "plan", "block-size", str(trace)]
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)

    plans = json.loads(run("--json").stdout)
    assert [plan["block_tokens"] for plan in plans] == [16, 32, 64, 128, 256, 512, 0]
    assert "best" in run("--sizes", "64,128").stdout
    for bad in (("--sizes", "x"), ("--device", "1GB"), ("--model", "gpt"), ("--sizes", "0")):
        assert run(*bad).returncode == 2, bad
