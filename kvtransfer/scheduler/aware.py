"""A policy that looks at what the paper's leaves out: memory and NIC load, rates, a report's age.

It differs from the paper's in two places. Decode groups are chosen by what their disks still have to
read, too, so that the shorter of the two disk queues that a pair offers is short more often. And the
side that reads a prefix is the one that is predicted to have it on the PE's device first, not the one
with fewer tokens queued: the two are the same as long as disks are equally fast and nothing else is
busy. Buffer space is in the queues already: what waits for a buffer is reported as not read yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvtransfer.scheduler.decode import DecodeGroup, DecodeGroups
from kvtransfer.scheduler.read_path import choose_side
from kvtransfer.scheduler.types import Disk, EngineLoad

__all__ = ["AwareDecode", "Speeds", "aged", "quicker_side"]

QUEUE_WEIGHT = 1.0  # of a token to read, in tokens of a decode group's load


@dataclass(frozen=True)
class Speeds:
    """Tokens per second of a compute NIC and of a node's memory; infinite where they don't matter."""

    network: float
    memory: float


def aged(disk: Disk, now_s: float) -> Disk:
    """As it should be by now: it has gone on reading since its report."""
    read = max(now_s - disk.reported_at_s, 0.0) * disk.tokens_per_s
    return replace(disk, reported_tokens=max(disk.reported_tokens - int(read), 0))


def quicker_side(
    hit_tokens: int, prefill: EngineLoad, decode: EngineLoad, speeds: Speeds, now_s: float
) -> Literal["pe", "de"]:
    """The side from which a prefix is predicted to be on the PE's device first.

    Loading, the compute NICs and the memories overlap layer by layer: the slowest decides. Ties, and
    disks whose rates aren't known, are the paper's to choose.
    """
    pe_disk, de_disk = aged(prefill.disk, now_s), aged(decode.disk, now_s)
    if not (pe_disk.tokens_per_s > 0 and de_disk.tokens_per_s > 0):
        return choose_side(prefill.disk, decode.disk)
    pe = max(
        (pe_disk.queue_tokens + hit_tokens) / pe_disk.tokens_per_s,
        (prefill.network_tokens + 2 * hit_tokens) / speeds.network,
        (_memory(pe_disk, 2) + 2 * hit_tokens) / speeds.memory,
        (_memory(de_disk, 3) + 2 * hit_tokens) / speeds.memory,
    )
    de = max(
        (de_disk.queue_tokens + hit_tokens) / de_disk.tokens_per_s,
        (decode.network_tokens + hit_tokens) / speeds.network,
        (_memory(de_disk, 3) + 3 * hit_tokens) / speeds.memory,
    )
    if pe == de:
        return choose_side(prefill.disk, decode.disk)
    return "pe" if pe < de else "de"


def _memory(disk: Disk, passes: int) -> int:
    """Tokens still to pass through a node's memory: ``passes`` of what its disk was given since."""
    return disk.memory_tokens + passes * disk.unreported_tokens


class AwareDecode(DecodeGroups):
    watches_disks = True

    def key(self, group: DecodeGroup) -> float:
        disks = {id(e.disk): e.disk for e in group.engines.values()}.values()
        return group.load + QUEUE_WEIGHT * sum(disk.queue_tokens for disk in disks)
