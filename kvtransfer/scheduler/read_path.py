"""Which side reads a request's hit tokens from storage (paper section 6.1)."""

from __future__ import annotations

from kvtransfer.scheduler.types import ReadPath

__all__ = ["choose_read_path"]


def choose_read_path(
    prefill_queue_tokens: int,
    decode_queue_tokens: int,
    prefill_total_tokens: int = 0,
    decode_total_tokens: int = 0,
) -> ReadPath:
    """The side whose disk read queue is shorter.

    The paper leaves ties open: with idle disks every request would take the same side. Equal
    queues go to the side that has read less so far, then to the PE (docs/decisions/0004).
    """
    prefill = (prefill_queue_tokens, prefill_total_tokens)
    decode = (decode_queue_tokens, decode_total_tokens)
    return "pe" if prefill <= decode else "de"
