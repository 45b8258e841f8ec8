"""The launcher over stand-in processes: starts, deaths and clean ends in milliseconds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from small_cluster import config

from kvtransfer.engine import cluster as launcher
from kvtransfer.engine.cluster import Cluster, new_cluster_name
from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.messages import (
    EngineLost,
    Finished,
    Hello,
    Journal,
    Message,
    Result,
    Shutdown,
    Started,
    Submit,
    decode_message,
    encode_message,
)
from kvtransfer.errors import ClusterError

LIVE = "import time; time.sleep(60)"


class FakeScheduler:
    """A thread on the scheduler's address that answers as the test wants."""

    def __init__(self, config: ClusterConfig) -> None:
        self.heard: list[Message] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(config.scheduler_address)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(20):
                continue
            sender, data = self._socket.recv_multipart()
            message = decode_message(data)
            self.heard.append(message)
            for answer in self._answers(message):
                self._socket.send_multipart([sender, encode_message(answer)])

    def _answers(self, message: Message) -> list[Message]:
        if isinstance(message, Hello):
            return [Started(prefill=["pe0"], decode=["de0"])]
        if isinstance(message, Submit):
            done = Finished(request_id=message.request_id, life=1, tokens=message.tokens)
            return [Result(finished=done, submitted_ns=1, assigned_ns=2, lives=1)]
        if isinstance(message, Shutdown):
            return [Journal(engine="pe0"), Journal(engine="de0")]
        return []

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


class StandIn:
    """What the launcher needs of a multiprocessing.Process, of any Python code."""

    def __init__(self, code: str, log: str) -> None:
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdout=file, stderr=subprocess.STDOUT
            )
        self.pid = self._process.pid
        self.kill = self._process.kill

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def join(self, timeout: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """role -> Python code that stands in for its process."""
    codes: dict[str, str] = {}

    def start(role: str, _: ClusterConfig, log: str) -> Any:
        return StandIn(codes.get(role, LIVE), log)

    monkeypatch.setattr(launcher, "start_process", start)
    monkeypatch.setattr(launcher, "STOP_TIMEOUT_S", 0.5)
    return codes


@pytest.fixture
def cast(scripts: dict[str, str]) -> Iterator[tuple[ClusterConfig, FakeScheduler]]:
    settings = config()
    scheduler = FakeScheduler(settings)
    yield settings, scheduler
    scheduler.close()


def test_names_of_clusters_are_never_the_same() -> None:
    assert len({new_cluster_name() for _ in range(100)}) == 100


def test_requests_go_out_and_results_come_back(cast: tuple[ClusterConfig, FakeScheduler]) -> None:
    settings, scheduler = cast
    import numpy as np

    with Cluster(settings) as cluster:
        assert set(cluster.pids) == {"scheduler", "pe0", "de0"}
        cluster.submit(5, np.arange(3, dtype=np.uint32), 2)
        (result,) = list(cluster.results(0.5))
        assert result.finished.request_id == 5
    assert isinstance(scheduler.heard[0], Hello)
    assert isinstance(scheduler.heard[-1], Shutdown)
    assert set(cluster.journals) == {"pe0", "de0"}


def test_leaving_kills_what_does_not_stop_and_removes_its_logs(
    cast: tuple[ClusterConfig, FakeScheduler],
) -> None:
    settings, _ = cast
    with Cluster(settings) as cluster:
        pids = list(cluster.pids.values())
        logs = [Path(log.name) for log in cluster._logs.values()]
        assert all(path.exists() for path in logs)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not any(path.exists() for path in logs)


def test_an_error_inside_ends_the_processes_without_waiting(
    cast: tuple[ClusterConfig, FakeScheduler],
) -> None:
    settings, scheduler = cast
    with pytest.raises(RuntimeError, match="mine"), Cluster(settings) as cluster:
        pids = list(cluster.pids.values())
        raise RuntimeError("mine")
    assert not any(isinstance(m, Shutdown) for m in scheduler.heard)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_process_that_can_not_start_is_named_with_its_last_words(
    cast: tuple[ClusterConfig, FakeScheduler],
    scripts: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, _ = cast
    monkeypatch.setattr(FakeScheduler, "_answers", lambda *_: [])
    scripts["pe0"] = "print('some line'); raise SystemExit('pe0: no such model')"
    with (
        pytest.raises(ClusterError, match=r"pe0 could not start: exit code 1: pe0: no such model"),
        Cluster(settings),
    ):
        pass


def test_a_start_that_takes_too_long_is_given_up(
    cast: tuple[ClusterConfig, FakeScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = cast
    monkeypatch.setattr(FakeScheduler, "_answers", lambda *_: [])
    monkeypatch.setattr(launcher, "START_TIMEOUT_S", 0.3)
    with pytest.raises(ClusterError, match="did not start"), Cluster(settings):
        pass


def test_a_dead_engine_is_reported_to_the_scheduler_once(
    cast: tuple[ClusterConfig, FakeScheduler],
) -> None:
    settings, scheduler = cast
    with Cluster(settings) as cluster:
        os.kill(cluster.pids["pe0"], signal.SIGKILL)
        assert list(cluster.results(0.6)) == []
        assert list(cluster.results(0.3)) == []
        assert cluster.lost == {"pe0": "killed by signal 9"}
    lost = [m for m in scheduler.heard if isinstance(m, EngineLost)]
    assert [(m.engine, m.reason) for m in lost] == [("pe0", "killed by signal 9")]


def test_a_dead_scheduler_is_an_error(cast: tuple[ClusterConfig, FakeScheduler]) -> None:
    settings, _ = cast
    with pytest.raises(ClusterError, match="the scheduler died"), Cluster(settings) as cluster:
        os.kill(cluster.pids["scheduler"], signal.SIGKILL)
        list(cluster.results(5))


def test_the_configuration_travels_as_json() -> None:
    settings = config(num_prefill=2, path="de", trace=True)
    back = msgspec.json.decode(msgspec.json.encode(settings), type=ClusterConfig)
    assert back == settings
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"name": "x"}', type=ClusterConfig)
