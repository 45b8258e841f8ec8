"""One process of a cluster, as the launcher's child.

Processes are forked from a server that has imported torch and transformers once (the standard
library's forkserver), so that starting one takes a fraction of a second instead of four. Each watches
the launcher and ends with it, and the server ends with the last of them: nothing is orphaned by a
kill -9 of the launcher.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from unittest import mock

import msgspec

from kvtransfer.engine.config import ClusterConfig
from kvtransfer.errors import KVTransferError

__all__ = ["prepare_processes", "start_process"]

PR_SET_NAME = 15
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

_context = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(
    [f"kvtransfer.engine.{name}" for name in ("decode", "prefill", "scheduler_process")]
)


def prepare_processes() -> None:
    """Starts the server, should it not run yet; it imports while the caller goes on."""
    with mock.patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()


def start_process(role: str, config: ClusterConfig, log: str) -> BaseProcess:
    """Starts ``scheduler``, ``peN`` or ``deN``; what it says goes to the file ``log``."""
    process = _context.Process(
        target=_main, args=(role, msgspec.json.encode(config), log), name=role, daemon=True
    )
    prepare_processes()
    process.start()
    return process


def _die_with_launcher() -> None:
    """Watches from a thread: the server lives as long as any child, so its death tells nothing."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        launcher.join()
        os._exit(1)

    threading.Thread(target=watch, name="watch-launcher", daemon=True).start()


def _main(role: str, config_json: bytes, log: str) -> None:
    _die_with_launcher()
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"kvt-{role}".encode())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    with open(log, "ab", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        _run(role, msgspec.json.decode(config_json, type=ClusterConfig))
    except KVTransferError as error:
        print(f"{role}: {error}", file=sys.stderr)
        sys.exit(2)


def _run(role: str, config: ClusterConfig) -> None:
    if role == "scheduler":
        from kvtransfer.engine.scheduler_process import SchedulerProcess

        SchedulerProcess(config).run()
    elif role.startswith("pe"):
        from kvtransfer.engine.prefill import PrefillEngine

        PrefillEngine(config, role).run()
    else:
        from kvtransfer.engine.decode import DecodeEngine

        DecodeEngine(config, role).run()
