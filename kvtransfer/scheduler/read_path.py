"""Which side reads a request's hit tokens from storage (paper section 6.1), or how much each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kvtransfer.scheduler.types import Disk

__all__ = ["Progress", "choose_side", "finish_s", "split_decode_tokens", "takes_over"]

TAKE_OVER_FACTOR = 2.0  # sooner, at least, or what was read before wouldn't pay
TAKE_OVER_FLOOR_S = 0.05


def choose_side(prefill: Disk, decode: Disk) -> Literal["pe", "de"]:
    """The side whose disk read queue is shorter.

    The paper leaves ties open: with idle disks every request would take the same side. Equal
    queues go to the side that has read less so far, then to the PE (docs/decisions/0004).
    """
    pe = (prefill.queue_tokens, prefill.total_tokens)
    de = (decode.queue_tokens, decode.total_tokens)
    return "pe" if pe <= de else "de"


def finish_s(
    hit_tokens: int,
    decode_tokens: int,
    prefill: Disk,
    decode: Disk,
    network_tokens_per_s: float = math.inf,
) -> float:
    """Predicted seconds until a prefix is on the PE's device and in the DE buffer.

    Both sides read their part, behind what is queued there. Then it crosses the PE's compute NIC,
    which does ``network_tokens_per_s``: everything is written to the device once; what the PE read
    from storage is read from its buffer for that and from the device for the DE (equations 1 and 2).
    """
    pe_rate, de_rate = _rates(prefill, decode)
    pe_tokens = hit_tokens - decode_tokens
    pe = (prefill.queue_tokens + pe_tokens) / pe_rate if pe_tokens else 0.0
    de = (decode.queue_tokens + decode_tokens) / de_rate if decode_tokens else 0.0
    return max(pe, de) + max(hit_tokens, 2 * pe_tokens) / network_tokens_per_s


def split_decode_tokens(
    hit_tokens: int,
    block_tokens: int,
    prefill: Disk,
    decode: Disk,
    network_tokens_per_s: float = math.inf,
) -> int:
    """How many of ``hit_tokens`` the DE reads so that :func:`finish_s` is least.

    With x tokens on the PE's side the reading takes max((q_PE + x) / b_PE, (q_DE + H - x) / b_DE),
    with the queues q and the measured rates b (equal ones while either is unknown). All of it is
    linear in pieces, so the best is where both sides finish together, where half is the PE's, or at
    an end; in whole blocks. The ends are the single sides: never predicted later than the better one.
    """
    pe_rate, de_rate = _rates(prefill, decode)
    if prefill.tokens_per_s <= 0 or decode.tokens_per_s <= 0:
        network_tokens_per_s = math.inf  # nothing to compare it with
    pe_queue, de_queue = prefill.queue_tokens, decode.queue_tokens
    even = (de_rate * (pe_queue + hit_tokens) - pe_rate * de_queue) / (pe_rate + de_rate)
    candidates = [0, hit_tokens]
    for kink in (even, hit_tokens / 2):
        below = int(min(max(kink, 0), hit_tokens)) // block_tokens * block_tokens
        candidates += [below, min(below + block_tokens, hit_tokens)]
    return min(
        candidates,
        key=lambda tokens: finish_s(hit_tokens, tokens, prefill, decode, network_tokens_per_s),
    )


@dataclass(slots=True)
class Progress:
    """How far one side of a split is: ``ready`` of its ``layers``, the first of them ``first_s`` after
    the load began, what was queued before it included; the last at ``last_s``, or none since then."""

    layers: int
    tokens: int
    ready: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    def see(self, ready: int, now_s: float) -> None:
        """Called often, with the seconds since the load began."""
        if self.ready == self.layers:
            return
        if self.ready == 0 and ready:
            self.first_s = now_s
        self.ready, self.last_s = ready, now_s

    @property
    def through(self) -> bool:
        return self.ready == self.layers

    @property
    def layer_s(self) -> float:
        """Seconds per layer since the first; of a side under way as if its next came now."""
        return (self.last_s - self.first_s) / max(self.ready - self.through, 1)


def takes_over(fast: Progress, slow: Progress) -> bool:
    """Whether the side of a split that is through should read the other's part as well.

    The other has begun to deliver, and what is left of it takes at least twice what reading all of it
    takes here: as long as the first layer took, and the others at this side's pace. Both are measured
    on this very load, so what slows all storage down alike moves nothing.
    """
    if not fast.through or slow.through or not slow.ready:
        return False
    left_s = slow.layer_s * (slow.layers - slow.ready)
    again_s = fast.first_s + fast.layer_s * fast.layers * slow.tokens / fast.tokens
    return left_s > TAKE_OVER_FACTOR * again_s + TAKE_OVER_FLOOR_S


def _rates(prefill: Disk, decode: Disk) -> tuple[float, float]:
    if prefill.tokens_per_s <= 0 or decode.tokens_per_s <= 0:
        return 1.0, 1.0
    return prefill.tokens_per_s, decode.tokens_per_s
