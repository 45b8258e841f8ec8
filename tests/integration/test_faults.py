"""Dead processes, bad blocks, full disks: right tokens or a clear error, never wrong tokens, a hang
or leftovers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import make_config, make_sessions, serve_and_verify

from kvtransfer.engine.cluster import Cluster
from kvtransfer.engine.replay import TurnRecord, run_replay
from kvtransfer.errors import ClusterError

pytestmark = pytest.mark.integration


class KillAfter:
    """kill -9 of one process once so many turns are through."""

    def __init__(self, role: str, turns: int) -> None:
        self.role, self.turns = role, turns
        self.cluster: Cluster | None = None

    def started(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def record(self, _: TurnRecord) -> None:
        self.turns -= 1
        if self.turns == 0:
            assert self.cluster is not None
            time.sleep(0.05)  # into the next turn's load
            os.kill(self.cluster.pids[self.role], signal.SIGKILL)


@pytest.mark.parametrize(("role", "path"), [("pe0", "auto"), ("de1", "auto"), ("de0", "split")])
def test_a_dead_engine_s_requests_run_elsewhere(tmp_path: Path, role: str, path: str) -> None:
    config = make_config(
        tmp_path, num_prefill=2, num_decode=2, storage_read_cap=8_000_000, path=path
    )
    killer = KillAfter(role, 4)
    run, report = serve_and_verify(
        config, make_sessions(count=3), on_record=killer.record, on_start=killer.started
    )
    assert len(run.records) == 12
    assert run.lost.keys() == {role}
    assert "signal 9" in run.lost[role]
    assert report.differences == [], "tokens as without any cache"
    assert report.tokens_checked > 0
    survivors = {r.prefill for r in run.records[-3:]} | {r.decode for r in run.records[-3:]}
    assert role not in survivors


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("pe0", "no prefill engine is left"),
        ("de0", "no decode engine is left"),
        ("scheduler", "the scheduler died"),
    ],
)
def test_without_a_replacement_the_error_names_the_dead(
    tmp_path: Path, role: str, message: str
) -> None:
    config = make_config(tmp_path, storage_read_cap=4_000_000)
    killer = KillAfter(role, 2)
    begin = time.monotonic()
    with pytest.raises(ClusterError, match=message):
        run_replay(config, make_sessions(), on_record=killer.record, on_start=killer.started)
    assert time.monotonic() - begin < 90


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    os.truncate(path, 8192)


def swap(path: Path) -> None:
    other = next(p for p in path.parents[2].rglob("*.kvb") if p != path)
    shutil.copyfile(other, path)


def unreadable(path: Path) -> None:
    """For either side an I/O error, not a bad block: there is a directory in its place."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("path", ["pe", "de", "split"])
@pytest.mark.parametrize(
    "damage", [flip, truncate, swap, unreadable, Path.unlink], ids=lambda f: f.__name__
)
def test_damaged_blocks_cost_a_recompute_and_nothing_else(
    tmp_path: Path, path: str, damage: Callable[[Path], None]
) -> None:
    done = []

    def spoil(record: TurnRecord) -> None:
        if record.turn == 1:  # between this turn's persist and the next turn's load
            files = sorted(tmp_path.rglob("*.kvb"), key=lambda p: p.stat().st_mtime_ns)
            damage(files[len(files) // 2])
            done.append(len(files))

    # Deep enough that the damaged block is in the middle of the next turn's prefix.
    config = make_config(tmp_path, path=path)
    run, report = serve_and_verify(config, make_sessions(count=1), on_record=spoil)
    assert done
    assert len(run.records) == 4
    assert report.rows_different == []
    assert report.differences == []
    third = run.records[2]
    if damage is Path.unlink:
        assert third.hit_blocks <= third.expected_hit_blocks
    else:
        assert third.failures, "the damage must have been noticed"
        assert third.attempts > 1
        assert third.hit_blocks < third.expected_hit_blocks


def test_a_full_store_stops_writes_and_serves_on(tmp_path: Path) -> None:
    """A cap below one session: eviction keeps the prefix usable and the tokens right."""
    config = make_config(tmp_path, store_max_bytes=3_000_000)
    run, report = serve_and_verify(config, make_sessions(turns=3))
    assert len(run.records) == 6
    assert report.differences == []
    assert sum(p.stat().st_size for p in tmp_path.rglob("*.kvb")) <= 3_000_000


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_stops_writes_and_serves_on(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=False
    )
    if mounted.returncode != 0:
        pytest.skip("this container may not mount a tmpfs")
    try:
        run, report = serve_and_verify(make_config(disk), make_sessions(turns=3))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert len(run.records) == 6
    assert report.differences == []
    assert run.journals["de0"].counters["store"]["refused_full"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool_blocks": 3}, "blocks of DE buffer"),
        ({"decode_tokens": 64}, "tokens of device memory"),
        ({"prefill_tokens": 64}, "prefill device memory"),
    ],
)
def test_a_request_too_large_for_an_engine_is_an_error_that_says_so(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(ClusterError, match=message):
        run_replay(make_config(tmp_path, **changes), make_sessions(count=1, turns=1))


def test_a_pool_smaller_than_all_requests_together_only_makes_them_wait(tmp_path: Path) -> None:
    config = make_config(tmp_path, pool_blocks=14, decode_tokens=2048)
    run, report = serve_and_verify(config, make_sessions(count=3, turns=3))
    assert len(run.records) == 9
    assert report.rows_different == []


def test_a_store_of_another_layout_ends_the_start_with_its_reason(tmp_path: Path) -> None:
    run_replay(make_config(tmp_path, journal=False), make_sessions(count=1, turns=1))
    with pytest.raises(ClusterError, match="another store directory"):
        run_replay(make_config(tmp_path, dtype="bfloat16"), make_sessions(count=1, turns=1))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopping_the_launcher_leaves_nothing(tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C and kill -9: the fixture checks for orphans and files."""
    replay = subprocess.Popen(
        [sys.executable, "-m", "kvtransfer.cli.main", "replay", "--store", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        # A shell starts what it runs in the background with interrupts ignored, tests included.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(tmp_path.rglob("*.kvb")):
        time.sleep(0.1)
    replay.send_signal(how)
    output, _ = replay.communicate(timeout=30)
    assert replay.returncode == (130 if how == signal.SIGINT else -9), output
    time.sleep(1.0)
