"""What the scheduler is told, what it believes and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

__all__ = ["Assignment", "Disk", "EngineLoad", "EngineReport", "Limits", "ReadPath", "Request"]

ReadPath = Literal["pe", "de", "split"]


class Request(msgspec.Struct, frozen=True):
    """One turn. ``num_tokens`` is the whole context, ``cached_tokens`` the part expected in the
    store, ``num_generate`` what decode will add; ``session`` is the agent it belongs to."""

    request_id: int
    num_tokens: int
    cached_tokens: int = 0
    num_generate: int = 0
    session: int = 0

    @property
    def peak_tokens(self) -> int:
        """Of device memory when the last token has been generated."""
        return self.num_tokens + self.num_generate


class EngineReport(msgspec.Struct, frozen=True):
    """An engine's state as of its last message: seq_e, tok_e, and read_q of its node (paper 6.1).

    ``free_tokens`` is a decode engine's free HBM in tokens; prefill engines leave it 0.
    ``read_queue_tokens`` are those that its node was given to read and has not read yet, and
    ``read_tokens_per_s`` what its storage was measured to read, 0 before it was. The policy ``aware``
    also looks at ``network_tokens`` and ``memory_tokens``, what its compute NIC still has to read for
    prefills and what has to pass through its node's memory; and ``at_s``, when that was counted, on the
    scheduler's clock.
    """

    engine: str
    group: str
    node: str
    unfinished_requests: int = 0
    unfinished_tokens: int = 0
    read_queue_tokens: int = 0
    free_tokens: int = 0
    read_tokens_per_s: float = 0.0
    network_tokens: int = 0
    memory_tokens: int = 0
    at_s: float = 0.0


@dataclass(slots=True)
class Disk:
    """A node's storage: what is queued on it as reported, and what was assigned since. With what
    its memory has to move."""

    reported_tokens: int = 0
    unreported_tokens: int = 0
    total_tokens: int = 0  # ever assigned
    tokens_per_s: float = 0.0
    reported_at_s: float = 0.0
    memory_tokens: int = 0

    @property
    def queue_tokens(self) -> int:
        return self.reported_tokens + self.unreported_tokens


@dataclass(slots=True)
class EngineLoad:
    """An engine as the scheduler believes it to be: its last report and what it was given since."""

    engine: str
    unfinished_requests: int = 0
    unfinished_tokens: int = 0
    free_tokens: int = 0
    disk: Disk = field(default_factory=Disk)
    picked: int = 0  # serial number of its last assignment
    network_tokens: int = 0

    def take(self, request: Request) -> None:
        self.unfinished_requests += 1
        self.unfinished_tokens += request.num_tokens
        self.free_tokens -= request.peak_tokens
        self.network_tokens += 2 * request.cached_tokens  # at most

    def set(self, report: EngineReport) -> None:
        self.unfinished_requests = report.unfinished_requests
        self.unfinished_tokens = report.unfinished_tokens
        self.free_tokens = report.free_tokens
        self.network_tokens = report.network_tokens

    @classmethod
    def of(cls, report: EngineReport) -> EngineLoad:
        """With a disk of its own."""
        disk = Disk(report.read_queue_tokens, tokens_per_s=report.read_tokens_per_s)
        load = cls(report.engine, disk=disk)
        load.set(report)
        return load


class Limits(msgspec.Struct, frozen=True):
    """alpha: tokens readable from storage in 3 s; beta: tokens one engine processes in 5 s (both
    profiled; `kvtransfer profile` measures them)."""

    alpha: int
    beta: int


class Assignment(msgspec.Struct, frozen=True):
    """A request's engines and who reads its hit tokens: of a split one the DE the first
    ``decode_tokens``, the PE the others."""

    request: Request
    prefill: str
    decode: str
    read_path: ReadPath
    decode_tokens: int = 0
