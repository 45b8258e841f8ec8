"""``kvtransfer bench ring``: what the doorbell-batched ring costs, and what it moves."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvtransfer.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from kvtransfer.transport import WorkRing

__all__ = ["ring"]

REGION_BYTES = 64 << 20
WINDOW = 256


@dataclass
class Row:
    """One transport, message size and batch; a value per repeat."""

    transport: str
    num_bytes: int
    batch: int
    post_ns: list[float] = field(default_factory=list)  # per request, of each batch
    gb_per_s: list[float] = field(default_factory=list)
    doorbells_per_request: float = 0.0
    limit: str = ""  # what `limit_gb_per_s` is
    limit_gb_per_s: list[float] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        ordered = sorted(self.post_ns)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def ring(
    transport: Annotated[str, typer.Option(help="of null, shm, verbs")] = "null,shm",
    batch: Annotated[str, typer.Option(help="requests a doorbell")] = "1,2,4,8,16,32,64",
    size: Annotated[str, typer.Option(help="bytes a request")] = "4096,65536,1048576",
    repeats: int = 5,
    seconds: Annotated[float, typer.Option(help="about so long a measurement")] = 0.1,
    device: Annotated[
        str, typer.Option(help="verbs: sender and receiver; default: the first two active")
    ] = "",
    limits: Annotated[
        bool, typer.Option(help="measure the limit beside each row, interleaved")
    ] = True,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Nanoseconds of CPU per work request, doorbells per request and GB/s, each beside its limit.

    `null` moves nothing: the ring's own cost. The limit of `shm` is memcpy in pieces of the same
    size, that of `verbs` is `ib_write_bw --post_list` on the same devices and depth (perftest).
    """
    batches, sizes = _numbers("batch", batch), _numbers("size", size)
    rows = []
    for name in transport.split(","):
        for num_bytes in [0] if name == "null" else sizes:
            for requests in batches:
                rows.append(Row(name, num_bytes, requests))
    devices = _devices(device) if "verbs" in transport.split(",") else ("", "")
    for _ in range(repeats):
        for row in rows:
            _measure(row, seconds, devices)
            if limits:
                _measure_limit(row, seconds, devices)
    _print(rows)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows]))


def _numbers(option: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidArgument(f"--{option} must be numbers with commas, got {text!r}") from error
    if not all(0 < value <= REGION_BYTES for value in values):
        raise InvalidArgument(f"--{option} must be in 1..{REGION_BYTES}, got {text!r}")
    return values


def _devices(wanted: str) -> tuple[str, str]:
    from kvtransfer.transport import verbs_devices

    ports, why = verbs_devices()
    names = wanted.split(",") if wanted else [p["device"] for p in ports if p["state"] == "active"]
    if not names:
        raise Unsupported(f"bench ring --transport verbs: {why or 'no active port'}")
    return names[0], names[-1] if len(names) < 2 else names[1]


def _open(row: Row, devices: tuple[str, str]) -> tuple[WorkRing, Any]:
    """The ring, and what has to live as long."""
    from kvtransfer.memory import MemoryRegion
    from kvtransfer.transport import VerbsDomain, VerbsOptions, make_null_ring, make_shm_ring

    if row.transport == "null":
        return make_null_ring(row.batch), None
    if row.transport == "shm":
        return make_shm_ring(REGION_BYTES, row.batch), None
    if row.transport != "verbs":
        raise InvalidArgument(f"--transport must be of null, shm, verbs, got {row.transport!r}")
    ends = []
    for name in devices:
        options = VerbsOptions(device=name, send_depth=WINDOW)
        domain = VerbsDomain(options=options, regions=[MemoryRegion(REGION_BYTES)])
        ends.append((domain, domain.make_endpoint(name=name)))
    blobs = [endpoint.blob() for _, endpoint in ends]
    far = ends[1][1].connect(blobs[0])
    return ends[0][1].connect(blobs[1], row.batch), (ends, far)


def _measure(row: Row, seconds: float, devices: tuple[str, str]) -> None:
    import numpy as np

    from kvtransfer.transport import WorkRing

    ring, _others = _open(row, devices)
    requests = np.zeros(max(REGION_BYTES // max(row.num_bytes, 65536), 1), WorkRing.DTYPE)
    step = max(row.num_bytes, 1)
    offsets = (np.arange(len(requests)) * step) % (REGION_BYTES - step + 1)
    requests["local_offset"] = requests["remote_offset"] = offsets
    requests["length"] = row.num_bytes
    window = WINDOW - WINDOW % row.batch
    warm = max(2 * row.batch, 16)
    _, elapsed, _ = ring.drive(requests, warm, window)  # tells how many are enough
    count = max(int(warm * seconds / max(elapsed, 1e-9)), row.batch)
    count = _peer_requests(row) if row.transport == "verbs" else count - count % row.batch
    before = ring.counters
    _, elapsed, per_batch = ring.drive(requests, count, window)
    after = ring.counters
    row.post_ns += per_batch.tolist()[:2000]
    row.gb_per_s.append(count * row.num_bytes / elapsed / 1e9)
    row.doorbells_per_request = (after["doorbells"] - before["doorbells"]) / count


def _peer_requests(row: Row) -> int:
    """Of a measurement beside perftest, which counts requests and not seconds."""
    count = max(int(128e6 // row.num_bytes), 4 * row.batch)
    return count - count % row.batch


def _measure_limit(row: Row, seconds: float, devices: tuple[str, str]) -> None:
    if row.transport == "shm":
        row.limit = "memcpy"
        row.limit_gb_per_s.append(_memcpy(row.num_bytes, seconds))
    elif row.transport == "verbs" and shutil.which("ib_write_bw"):
        row.limit = "ib_write_bw"
        row.limit_gb_per_s.append(_ib_write_bw(row, devices))


def _memcpy(num_bytes: int, seconds: float) -> float:
    import numpy as np

    # take() copies row by row with memmove: pieces of this size, without a Python call for each.
    count = REGION_BYTES // num_bytes
    here = np.ones((count, num_bytes), np.uint8)
    there = np.ones_like(here)
    order = np.arange(count)
    done, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        np.take(here, order, axis=0, out=there, mode="clip")
        done += count
    return done * num_bytes / (time.perf_counter() - begin) / 1e9


def _ib_write_bw(row: Row, devices: tuple[str, str]) -> float:
    """perftest on the same two devices, in two processes of its own."""
    count = _peer_requests(row)
    common = ["-s", str(row.num_bytes), "-n", str(count), "-t", str(WINDOW), "-l", str(row.batch)]
    common += ["-F", "-x", "1", "-m", "4096", "--report_gbits", "-q", "1", "-p", "18600"]
    server, client_side = (["ib_write_bw", "-d", name, *common] for name in devices[::-1])
    process = subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(20):
            time.sleep(0.2)
            client = subprocess.run(
                [*client_side, "127.0.0.1"], capture_output=True, text=True, check=False
            )
            for line in client.stdout.splitlines():
                fields = line.split()
                if len(fields) >= 5 and fields[0] == str(row.num_bytes):
                    return float(fields[3]) / 8
    finally:
        process.kill()
        process.wait()
    raise Unsupported(f"ib_write_bw gave no result: {client.stderr.strip() or client.stdout}")


def _print(rows: list[Row]) -> None:
    table = Table(
        "transport",
        "bytes",
        "batch",
        "post ns p50",
        "p99",
        "doorbells/request",
        "GB/s",
        "min-max",
        "limit",
        "limit GB/s",
        "share",
    )
    for row in rows:
        speed = statistics.median(row.gb_per_s)
        cells = [row.transport, str(row.num_bytes), str(row.batch)]
        cells += [f"{row.percentile(0.5):.1f}", f"{row.percentile(0.99):.1f}"]
        cells += [f"{row.doorbells_per_request:.4f}"]
        cells += (
            [f"{speed:.3f}", f"{min(row.gb_per_s):.3f}-{max(row.gb_per_s):.3f}"]
            if row.num_bytes
            else ["", ""]
        )
        if row.limit_gb_per_s:
            limit = statistics.median(row.limit_gb_per_s)
            cells += [row.limit, f"{limit:.3f}", f"{speed / limit:.0%}"]
        else:
            cells += ["", "", ""]
        table.add_row(*cells)
    console = Console()
    wide = console if console.is_terminal else Console(width=130)
    wide.print(table)
