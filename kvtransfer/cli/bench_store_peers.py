"""What ``kvtransfer bench store`` is measured against: fio, plain Python files, torch files."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtransfer.errors import Unsupported

__all__ = ["Fio", "Meter", "PlainFiles", "TorchFiles"]

Result = tuple[float, float, float, float]  # seconds, CPU seconds, latency p50 and p99 in seconds


class Meter:
    """Times what a measurement is about, and nothing of its set-up; or counts its system calls."""

    def __init__(self) -> None:
        self._counting = False
        self._calls: int | None = None

    def measure(self, work: Callable[[], None]) -> tuple[float, float]:
        """(seconds, CPU seconds of this process)."""
        if self._counting:
            self._calls = _count_system_calls(work)
            return 1.0, 0.0
        cpu, begin = _cpu_seconds(), time.perf_counter()
        work()
        return time.perf_counter() - begin, _cpu_seconds() - cpu

    def count_calls(self, run: Callable[[], Any]) -> int | None:
        """System calls of what ``run()`` measures; None without a working strace."""
        self._counting, self._calls = True, None
        try:
            run()
        finally:
            self._counting = False
        return self._calls


class Fio:
    """fio with io_uring: what kernel and device give to ``count`` whole files of that size."""

    def __init__(
        self, folder: Path, file_bytes: int, count: int, depth: int, files: list[Path]
    ) -> None:
        """Reads ``files`` (under other names); writes files of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.files = folder, files
        self.common = [
            *("fio", "--name=limit", "--thread", "--direct=1", "--ioengine=io_uring"),
            *("--fixedbufs=1", f"--iodepth={depth}", f"--directory={folder}"),
            *("--filename_format=file.$filenum", f"--nrfiles={count}", f"--openfiles={count}"),
            *(f"--filesize={file_bytes}", f"--bs={file_bytes}", f"--size={file_bytes * count}"),
            *("--fallocate=none", "--output-format=json", "--lat_percentiles=1"),
        ]
        self.start_cost: dict[str, float] = {}

    def read(self) -> Result:
        for i, path in enumerate(self.files):
            link = self.folder / f"file.{i}"
            if not link.exists():
                link.hardlink_to(path)
        return self._run("read", ["--rw=randread", "--file_service_type=random"])

    def write(self) -> Result:
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        creating = ["--rw=write", "--create_on_open=1", "--file_service_type=sequential"]
        return self._run("write", creating)

    def _run(self, key: str, more: list[str]) -> Result:
        if key not in self.start_cost:
            once = [self._start([*more, "--number_ios=1"])[0] for _ in range(3)]
            self.start_cost[key] = statistics.median(once)
        cpu, job = self._start(more)
        part = job[key]
        seconds = part["io_bytes"] / part["bw_bytes"]
        # Of the whole process, so that the kernel's workers count, less what starting it costs; and
        # not less than what its own thread reports.
        own = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
        latency = part["lat_ns"]["percentile"]
        return (
            seconds,
            max(cpu - self.start_cost[key], own),
            latency["50.000000"] / 1e9,
            latency["99.000000"] / 1e9,
        )

    def _start(self, more: list[str]) -> tuple[float, dict[str, Any]]:
        """CPU seconds of the whole process, and what it reports."""
        before = _cpu_seconds(resource.RUSAGE_CHILDREN)
        done = subprocess.run([*self.common, *more], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Unsupported(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
        cpu = _cpu_seconds(resource.RUSAGE_CHILDREN) - before
        return cpu, json.loads(done.stdout)["jobs"][0]


class PlainFiles:
    """A file per block in one Python thread: open, preadv or pwrite, close."""

    def __init__(self, folder: Path, file_bytes: int, count: int, meter: Meter) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.meter = meter
        self.paths = [folder / f"block-{i}" for i in range(count)]
        self.file_bytes = file_bytes

    def read(self) -> Result:
        if not self.paths[0].exists():
            self.write()
        buffer = bytearray(self.file_bytes)

        def one(path: Path) -> None:
            fd = os.open(path, os.O_RDONLY)
            if os.preadv(fd, [buffer], 0) != self.file_bytes:
                raise Unsupported(f"{path} is shorter than it was written")
            os.close(fd)

        return self._each(one, cold=True)

    def write(self) -> Result:
        data = os.urandom(self.file_bytes)
        for path in self.paths:
            path.unlink(missing_ok=True)

        def one(path: Path) -> None:
            path.write_bytes(data)

        return self._each(one, cold=False)

    def _each(self, one: Callable[[Path], None], cold: bool) -> Result:
        if cold:
            _drop_cache(self.paths)
        order = random.sample(self.paths, len(self.paths))
        times: list[float] = []

        def all_of_them() -> None:
            for path in order:
                at = time.perf_counter()
                one(path)
                times.append(time.perf_counter() - at)

        seconds, cpu = self.meter.measure(all_of_them)
        times.sort()
        return seconds, cpu, times[len(times) // 2], times[int(len(times) * 0.99)]


class TorchFiles(PlainFiles):
    """torch.save and torch.load of one tensor per block."""

    def read(self) -> Result:
        import torch

        if not self.paths[0].exists():
            self.write()
        return self._each(lambda path: torch.load(path, weights_only=True), cold=True)

    def write(self) -> Result:
        import torch

        tensor = torch.randint(0, 256, (self.file_bytes,), dtype=torch.uint8)
        return self._each(lambda path: torch.save(tensor, path), cold=False)


def _count_system_calls(run: Callable[[], Any]) -> int | None:
    """Of this process and its threads while ``run()`` runs; None without a working strace."""
    if shutil.which("strace") is None:
        run()
        return None
    with tempfile.NamedTemporaryFile("r") as counts:
        attach = ["strace", "-f", "-c", "-o", counts.name, "-p", str(os.getpid())]
        with subprocess.Popen(attach, stderr=subprocess.PIPE, text=True) as tracer:
            assert tracer.stderr is not None
            attached = "attached" in tracer.stderr.readline()
            run()
            tracer.send_signal(signal.SIGINT)
        for line in counts.read().splitlines() if attached else []:
            fields = line.split()
            if fields and fields[-1] == "total":
                return int(fields[3] if len(fields) > 4 else fields[2])
    return None


def _drop_cache(paths: list[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _cpu_seconds(who: int = resource.RUSAGE_SELF) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime
