"""Entry point of one process of a cluster: ``python -m kvtransfer.engine.process ROLE CONFIG``.

ROLE is ``scheduler``, ``peN`` or ``deN``; CONFIG is the JSON of a ClusterConfig. The process dies
with its parent (PR_SET_PDEATHSIG), so that nothing is orphaned by a kill -9 of the launcher.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

import msgspec

from kvtransfer.engine.config import ClusterConfig
from kvtransfer.errors import KVTransferError

__all__ = ["main"]

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def main(role: str, config_json: str, parent: int) -> int:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        config = msgspec.json.decode(config_json, type=ClusterConfig)
        if role == "scheduler":
            from kvtransfer.engine.scheduler_process import SchedulerProcess

            SchedulerProcess(config).run()
        elif role.startswith("pe"):
            from kvtransfer.engine.prefill import PrefillEngine

            PrefillEngine(config, role).run()
        else:
            from kvtransfer.engine.decode import DecodeEngine

            DecodeEngine(config, role).run()
    except KVTransferError as error:
        print(f"{role}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
