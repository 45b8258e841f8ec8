"""Processes of a cluster as the launcher's children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_cluster import config

from kvtransfer.engine.process import start_process


def test_an_engine_that_can_not_start_says_why_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start_process("pe0", config(store=str(tmp_path / "s")), str(log))
    process.join(60)
    assert process.exitcode == 2
    assert log.read_text().startswith("pe0: this process's model tiny")


def test_an_unknown_model_is_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start_process("de0", config(model="gpt-9", store=str(tmp_path / "s")), str(log))
    process.join(60)
    assert process.exitcode == 2
    assert log.read_text() == "de0: unknown model 'gpt-9': use tiny, smollm2 or a local directory\n"


def test_a_process_is_named_after_its_role_and_ignores_the_launchers_interrupt(
    tmp_path: Path,
) -> None:
    settings = config(store=str(tmp_path / "s"))
    process = start_process("scheduler", settings, str(tmp_path / "log"))
    assert process.pid is not None
    comm = Path(f"/proc/{process.pid}/comm")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and comm.read_text() != "kvt-scheduler\n":
        time.sleep(0.01)
    time.sleep(0.1)  # past the line that sets the handler
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.2)
    assert process.exitcode is None
    process.kill()
    process.join(10)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("role", ["scheduler", "pe0"])
def test_two_clusters_share_the_server_they_fork_from(tmp_path: Path, role: str) -> None:
    parents = set()
    for _ in range(2):
        settings = config(model="gpt-9", store=str(tmp_path / "s"))
        process = start_process(role, settings, str(tmp_path / "log"))
        parents.add(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        process.kill()
        process.join(10)
    assert len(parents) == 1


LAUNCH = """
import sys, time
from kvtransfer.engine import process
from kvtransfer.engine.config import ClusterConfig

if __name__ == "__main__":
    config = ClusterConfig(name="x", store="/tmp/unused", namespace="00" * 32, layer_planes=[[4]])
    process.forkserver.set_forkserver_preload([])
    child = process.start_process("scheduler", config, sys.argv[1])
    print(child.pid, flush=True)
    time.sleep(60)
"""


def test_a_child_dies_with_its_launcher(tmp_path: Path) -> None:
    """kill -9 of the launcher leaves no orphan, neither engines nor the server they fork from."""
    script, log = tmp_path / "launch.py", tmp_path / "log"
    script.write_text(LAUNCH)
    process = subprocess.Popen([sys.executable, str(script), str(log)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    server = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    deadline = time.monotonic() + 20
    while (
        time.monotonic() < deadline and Path(f"/proc/{pid}/comm").read_text() != "kvt-scheduler\n"
    ):
        time.sleep(0.02)
    process.kill()
    process.wait()
    process.stdout.close()
    while time.monotonic() < deadline and (_runs(pid) or _runs(server)):
        time.sleep(0.02)
    assert not _runs(pid)
    assert not _runs(server)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
