"""How an engine's storage is doing: its measured rate, and what its failures mean."""

from __future__ import annotations

import time

from kvtransfer.transport import Ticket, TrafficManager

__all__ = ["ReadRate", "failed_itself", "is_unwell"]

MEMORY_S = 5.0  # of reading; older measurements fade


class ReadRate:
    """Tokens per second that storage reads deliver while there are any."""

    def __init__(self, bytes_per_token: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._bytes = self._seconds = 0.0
        self._last_bytes = 0
        self._last_at = time.monotonic()
        self._was_reading = False

    def look(self, traffic: TrafficManager) -> None:
        """Called often: what has been read since the last call counts if reads were queued then."""
        now, total = time.monotonic(), traffic.counters()["storage_read"]["bytes"]
        if self._was_reading:
            fade = max(1.0 - (now - self._last_at) / MEMORY_S, 0.0)
            self._bytes = self._bytes * fade + total - self._last_bytes
            self._seconds = self._seconds * fade + now - self._last_at
        self._last_at, self._last_bytes = now, total
        self._was_reading = traffic.read_queue_tokens > 0

    @property
    def tokens_per_s(self) -> float:
        """To two digits, so that it is news only when it has changed; 0 before anything was read."""
        if self._seconds <= 0:
            return 0.0
        return float(f"{self._bytes / self._seconds / self._bytes_per_token:.2g}")


def failed_itself(load: Ticket) -> bool:
    """The load has an error of its own; it wasn't cancelled because of something else."""
    return load.error is not None and load.error[0] != "cancelled"


def is_unwell(load: Ticket) -> bool:
    """The storage didn't answer or gave an error. A block that is bad or gone is so for everyone; this
    may be one side's trouble only, and the other side should try."""
    return load.error is not None and load.error[0] in ("io", "timeout")
