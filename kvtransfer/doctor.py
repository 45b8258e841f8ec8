"""What this machine has of what transfers can use, what is missing and how to get it.

:func:`examine` looks; it changes nothing and needs no privileges. ``kvtransfer doctor`` prints it.
"""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

from kvtransfer.transport import IoBackend, io_features, probe_io, verbs_devices

__all__ = ["Finding", "examine", "usable"]

GIB = 1 << 30
WANTED_MEMLOCK = 1 * GIB


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``ok`` is None where there is nothing to judge."""

    group: str  # system, memory, io, rdma, transport
    name: str
    ok: bool | None
    found: str
    fix: str = ""  # a command or a sentence; empty when fine


def examine() -> list[Finding]:
    return [*_system(), *_memory(), *_io(), *_rdma(), *_transports()]


def usable(findings: list[Finding]) -> set[str]:
    """Names of the transports that will work."""
    return {f.name for f in findings if f.group == "transport" and f.ok}


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _system() -> list[Finding]:
    mode = {"0": "off", "1": "strict", "2": "filter"}.get(_status("Seccomp"), "unknown")
    return [
        Finding("system", "kernel", None, f"{platform.system()} {platform.release()}"),
        Finding("system", "cpus", None, str(len(os.sched_getaffinity(0)))),
        Finding("system", "seccomp", None, mode),
    ]


def _status(field: str) -> str:
    for line in _read("/proc/self/status").splitlines():
        if line.startswith(field + ":"):
            return line.split()[1]
    return ""


def _memory() -> list[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    enough = unlimited or soft >= WANTED_MEMLOCK or _has_ipc_lock()
    amount = "unlimited" if unlimited else f"{soft / GIB:.3g} GiB"
    note = " (CAP_IPC_LOCK lifts it)" if _has_ipc_lock() and not unlimited else ""
    pages = {
        line.split(":")[0]: line.split()[1]
        for line in _read("/proc/meminfo").splitlines()
        if line.startswith(("HugePages_Total", "HugePages_Free"))
    }
    free = int(pages.get("HugePages_Free", "0"))
    transparent = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = transparent[transparent.find("[") + 1 : transparent.find("]")] or "absent"
    return [
        Finding(
            "memory", "memlock", enough, amount + note, "" if enough else "ulimit -l unlimited"
        ),
        Finding(
            "memory",
            "huge pages",
            free > 0,
            f"{free} of {pages.get('HugePages_Total', '0')} reserved 2 MiB pages free",
            "" if free else "sysctl vm.nr_hugepages=N (N = pool bytes / 2 MiB)",
        ),
        Finding("memory", "transparent huge pages", chosen in ("always", "madvise"), chosen),
        _shared_huge_pages(free > 0),
    ]


def _shared_huge_pages(reserved: bool) -> Finding:
    """Pools of the shm transport lie in memfds, whose transparent huge pages have a switch of
    their own."""
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    text = _read(path)
    chosen = text[text.find("[") + 1 : text.find("]")] or "absent"
    ok = reserved or chosen in ("always", "within_size", "advise", "force")
    return Finding(
        "memory",
        "huge pages of shared memory",
        ok,
        chosen,
        "" if ok else f"echo advise > {path} (storage reads up to twice as fast)",
    )


def _has_ipc_lock() -> bool:
    return bool(int(_status("CapEff") or "0", 16) & (1 << 14))


def _io() -> list[Finding]:
    backend, reason = probe_io(IoBackend.auto)
    fix = (
        "allow io_uring_setup in the container's seccomp profile; sysctl kernel.io_uring_disabled=0"
    )
    return [
        Finding(
            "io",
            "io_uring",
            backend == "uring",
            io_features(IoBackend.auto) if backend == "uring" else f"{backend}: {reason}",
            "" if backend == "uring" else fix,
        )
    ]


def _rdma() -> list[Finding]:
    ports, why = verbs_devices()
    if not ports:
        return [Finding("rdma", "devices", False, f"none: {why}", _rdma_fix(why))]
    findings = []
    for port in ports:
        active = port["state"] == "active"
        gids = ", ".join(f"{g['index']}: {g['gid']} {g['type']}" for g in port["gids"])
        found = f"{port['link_layer']}, {port['state']}, mtu {port['mtu_bytes']}, gids [{gids}]"
        fix = "" if active else "ip link set IFACE up (RoCE) or start a subnet manager (InfiniBand)"
        name = f"{port['device']} port {port['port']}"
        findings.append(Finding("rdma", name, active, found, fix))
    peer_memory = Path("/sys/module/nvidia_peermem").is_dir()
    findings.append(
        Finding(
            "rdma",
            "GPU memory",
            None,
            "nvidia_peermem is loaded" if peer_memory else "no peer memory module; dma-buf only",
        )
    )
    return findings


def _rdma_fix(why: str) -> str:
    if "libibverbs" in why:
        return "apt install libibverbs1 ibverbs-providers"
    if "no RDMA support" in why:
        return "modprobe ib_uverbs; without an RDMA NIC: modprobe rdma_rxe (Soft-RoCE)"
    return "rdma link add rxe0 type rxe netdev IFACE (Soft-RoCE), or the NIC's driver"


def _transports() -> list[Finding]:
    ports, why = verbs_devices()
    active = any(port["state"] == "active" for port in ports)
    reason = "" if active else (why or "no port is active")
    return [
        Finding("transport", "shm", True, "peers on this machine"),
        Finding(
            "transport",
            "verbs",
            active,
            reason or "peers over RDMA",
            "" if active else _rdma_fix(why),
        ),
    ]
