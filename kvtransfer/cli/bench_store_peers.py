"""What ``kvtransfer bench store`` is measured against: fio, plain Python files, torch files."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtransfer.errors import Unsupported

__all__ = ["Fio", "PlainFiles", "TorchFiles", "count_system_calls"]

Result = tuple[float, float, float, float]  # seconds, CPU seconds, latency p50 and p99 in seconds


class Fio:
    """fio with io_uring: what kernel and device give to ``count`` whole files of that size."""

    def __init__(self, folder: Path, file_bytes: int, count: int, depth: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file_bytes, self.count = folder, file_bytes, count
        self.common = [
            *("fio", "--name=limit", "--thread", "--direct=1", "--ioengine=io_uring"),
            *("--fixedbufs=1", f"--iodepth={depth}", f"--directory={folder}"),
            *("--filename_format=file.$filenum", f"--nrfiles={count}", f"--openfiles={count}"),
            *(f"--filesize={file_bytes}", f"--bs={file_bytes}", f"--size={file_bytes * count}"),
            *("--fallocate=none", "--output-format=json", "--lat_percentiles=1"),
        ]

    def read(self) -> Result:
        if not (self.folder / "file.0").exists():
            self.write()
        return self._run("read", ["--rw=randread", "--file_service_type=random"])

    def write(self) -> Result:
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        creating = ["--rw=write", "--create_on_open=1", "--file_service_type=sequential"]
        return self._run("write", creating)

    def _run(self, key: str, more: list[str]) -> Result:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([*self.common, *more], capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode != 0:
            raise Unsupported(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
        job = json.loads(done.stdout)["jobs"][0]
        part = job[key]
        seconds = part["io_bytes"] / part["bw_bytes"]
        # All of the process: its own threads' share leaves out the kernel's workers. Starting fio
        # costs some 50 ms of it, which is measured and taken off.
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        cpu = max(cpu - _start_cost(tuple(self.common[:1])), 0.0)
        latency = part["lat_ns"]["percentile"]
        return seconds, cpu, latency["50.000000"] / 1e9, latency["99.000000"] / 1e9
