"""The launcher: starts scheduler and engines as child processes, watches them, and is their client."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from types import TracebackType

import numpy as np
import numpy.typing as npt
import zmq

from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.messages import (
    EngineLost,
    Hello,
    Journal,
    Message,
    Result,
    Shutdown,
    Started,
    Submit,
    decode_message,
    encode_message,
    pack_tokens,
)
from kvtransfer.engine.process import start_process
from kvtransfer.errors import ClusterError

__all__ = ["Cluster", "new_cluster_name"]

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0
POLL_MS = 100
CLIENT = b"client"


def new_cluster_name() -> str:
    return f"kvt-{os.getpid()}-{uuid.uuid4().hex[:8]}"


class Cluster:
    """Context manager. Not thread-safe.

    A dead engine is reported to the scheduler, which runs its requests elsewhere while it can; a
    dead scheduler raises ClusterError. Leaving the context stops every process; what can't be
    stopped is killed. Nothing is left behind: sockets are abstract, shared memory is anonymous.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.journals: dict[str, Journal] = {}
        self.lost: dict[str, str] = {}
        self._processes: dict[str, BaseProcess] = {}
        self._logs: dict[str, tempfile._TemporaryFileWrapper[bytes]] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, CLIENT)
        self._socket.setsockopt(zmq.LINGER, 0)

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Cluster:
        try:
            for role in ("scheduler", *self.config.prefill_engines, *self.config.decode_engines):
                self._spawn(role)
            self._socket.connect(self.config.scheduler_address)
            self._send(Hello(engine=CLIENT.decode(), kind="client", epoch=0))
            self._wait_started()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._stop()
        finally:
            self._kill()

    def _spawn(self, role: str) -> None:
        log = tempfile.NamedTemporaryFile(prefix=f"{self.config.name}-{role}-")  # noqa: SIM115
        self._logs[role] = log
        self._processes[role] = start_process(role, self.config, log.name)

    def _wait_started(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            for role, process in self._processes.items():
                if process.exitcode is not None:
                    raise ClusterError(f"{role} could not start: {self.describe_exit(role)}")
            if any(isinstance(m, Started) for m in self._receive(POLL_MS)):
                return
        raise ClusterError(f"the engines did not start within {START_TIMEOUT_S:.0f} s")

    def _stop(self) -> None:
        """Asks everyone to end and collects their journals."""
        if self._processes["scheduler"].exitcode is None:
            self._send(Shutdown())
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline and self._alive():
            for message in self._receive(POLL_MS):
                if isinstance(message, Journal):
                    self.journals[message.engine] = message

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.exitcode is None:
                process.kill()
        for process in self._processes.values():
            process.join(10)
        for log in self._logs.values():
            with contextlib.suppress(OSError):
                log.close()
        self._context.destroy(linger=0)

    def _alive(self) -> list[str]:
        return [role for role, process in self._processes.items() if process.exitcode is None]

    @property
    def pids(self) -> dict[str, int]:
        return {role: process.pid or 0 for role, process in self._processes.items()}

    def describe_exit(self, role: str) -> str:
        """How a process ended, with the last line it said."""
        code = self._processes[role].exitcode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        said = self.log_of(role).strip().splitlines()
        return f"{how}: {said[-1]}" if said else how

    def log_of(self, role: str) -> str:
        """What the process has written to its standard output and error."""
        with open(self._logs[role].name, "rb") as file:
            return file.read().decode(errors="replace")

    # ------------------------------------------------------------------ work

    def submit(self, request_id: int, tokens: npt.NDArray[np.uint32], num_generate: int) -> None:
        self._send(
            Submit(request_id=request_id, tokens=pack_tokens(tokens), num_generate=num_generate)
        )

    def results(self, timeout_s: float) -> Iterator[Result]:
        """Results as they come, until none came for ``timeout_s``; then TransferTimeout isn't raised
        but the iterator ends. Raises ClusterError when the scheduler died."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._watch()
            for message in self._receive(POLL_MS):
                if isinstance(message, Result):
                    deadline = time.monotonic() + timeout_s
                    yield message

    def _watch(self) -> None:
        for role, process in self._processes.items():
            if process.exitcode is None or role in self.lost:
                continue
            self.lost[role] = self.describe_exit(role)
            if role == "scheduler":
                raise ClusterError(f"the scheduler died ({self.lost[role]})")
            self._send(EngineLost(engine=role, reason=self.lost[role]))

    def _send(self, message: Message) -> None:
        self._socket.send(encode_message(message))

    def _receive(self, timeout_ms: int) -> list[Message]:
        messages: list[Message] = []
        if self._socket.poll(timeout_ms):
            with contextlib.suppress(zmq.Again):
                while True:
                    messages.append(decode_message(self._socket.recv(zmq.NOBLOCK)))
        return messages
