"""Which side reads a request's hit tokens from storage (paper section 6.1), or how much each."""

from __future__ import annotations

from typing import Literal

from kvtransfer.scheduler.types import Disk

__all__ = ["choose_side", "finish_s", "split_decode_tokens"]


def choose_side(prefill: Disk, decode: Disk) -> Literal["pe", "de"]:
    """The side whose disk read queue is shorter.

    The paper leaves ties open: with idle disks every request would take the same side. Equal
    queues go to the side that has read less so far, then to the PE (docs/decisions/0004).
    """
    pe = (prefill.queue_tokens, prefill.total_tokens)
    de = (decode.queue_tokens, decode.total_tokens)
    return "pe" if pe <= de else "de"


def finish_s(hit_tokens: int, decode_tokens: int, prefill: Disk, decode: Disk) -> float:
    """Predicted seconds until both sides have read their part, behind what is queued there."""
    pe_rate, de_rate = _rates(prefill, decode)
    pe_tokens = hit_tokens - decode_tokens
    pe = (prefill.queue_tokens + pe_tokens) / pe_rate if pe_tokens else 0.0
    de = (decode.queue_tokens + decode_tokens) / de_rate if decode_tokens else 0.0
    return max(pe, de)


def split_decode_tokens(hit_tokens: int, block_tokens: int, prefill: Disk, decode: Disk) -> int:
    """How many of ``hit_tokens`` the DE reads so that both sides are predicted to finish together.

    With x tokens on the PE's side the prediction is max((q_PE + x) / b_PE, (q_DE + H - x) / b_DE),
    with the queues q and the measured rates b (equal ones while either is unknown). The result is
    whole blocks, 0 (the PE reads all) or ``hit_tokens`` (the DE does), whichever is predicted to be
    done first: never later than the better single side.
    """
    pe_rate, de_rate = _rates(prefill, decode)
    pe_queue, de_queue = prefill.queue_tokens, decode.queue_tokens
    even = (de_rate * (pe_queue + hit_tokens) - pe_rate * de_queue) / (pe_rate + de_rate)
    below = int(min(max(even, 0), hit_tokens)) // block_tokens * block_tokens
    candidates = {0, below, min(below + block_tokens, hit_tokens), hit_tokens}
    return min(
        sorted(candidates, key=lambda tokens: (tokens not in (0, hit_tokens), tokens)),
        key=lambda tokens: finish_s(hit_tokens, tokens, prefill, decode),
    )


def _rates(prefill: Disk, decode: Disk) -> tuple[float, float]:
    if prefill.tokens_per_s <= 0 or decode.tokens_per_s <= 0:
        return 1.0, 1.0
    return prefill.tokens_per_s, decode.tokens_per_s
