"""Intra-engine scheduling of prefill batches under a compute quota (paper section 6.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvtransfer.errors import InvalidArgument

__all__ = ["AttentionTimeModel", "BatchItem", "PrefillWork", "attention_pairs", "form_batch"]


def attention_pairs(cached: int, new: int) -> int:
    """Query-key pairs of ``new`` causal tokens behind ``cached`` ones: attention FLOPs up to a
    constant of the model."""
    return new * cached + new * (new + 1) // 2


@dataclass(frozen=True)
class AttentionTimeModel:
    """Seconds of attention, summed over layers, for a set of (cached, new) pairs.

    ``fixed_s`` per forward, ``per_token_s`` per new token, ``per_pair_s`` per query-key pair;
    fitted by `kvtransfer profile` from measured forwards.
    """

    fixed_s: float
    per_token_s: float
    per_pair_s: float

    def seconds(self, items: Iterable[tuple[int, int]]) -> float:
        total = self.fixed_s
        for cached, new in items:
            total += self.increment(cached, new)
        return total

    def increment(self, cached: int, new: int) -> float:
        return self.per_token_s * new + self.per_pair_s * attention_pairs(cached, new)

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, int, float]]) -> AttentionTimeModel:
        """Least squares over (cached, new, seconds), with no negative coefficient.

        Raises InvalidArgument for fewer than three samples.
        """
        if len(samples) < 3:
            raise InvalidArgument(f"needs at least 3 samples to fit, got {len(samples)}")
        rows = np.array([[1.0, new, attention_pairs(cached, new)] for cached, new, _ in samples])
        times = np.array([seconds for _, _, seconds in samples])
        active = [0, 1, 2]
        while True:  # drop columns that come out negative: a time can't fall with work
            scale = np.maximum(np.abs(rows[:, active]).max(axis=0), 1e-30)
            solution = np.linalg.lstsq(rows[:, active] / scale, times, rcond=None)[0] / scale
            if (solution >= 0).all() or len(active) == 1:
                break
            active.pop(int(np.argmin(solution * scale)))
        full = np.zeros(3)
        full[active] = np.maximum(solution, 0)
        return cls(*(float(value) for value in full))


class PrefillWork(msgspec.Struct, frozen=True):
    """A request waiting for prefill: ``cached`` tokens have their KV, ``remaining`` do not."""

    request_id: int
    cached: int
    remaining: int


class BatchItem(msgspec.Struct, frozen=True):
    """``new`` tokens of a request, computed behind ``cached`` ones in this forward."""

    request_id: int
    cached: int
    new: int


def form_batch(
    queue: Iterable[PrefillWork], model: AttentionTimeModel, quota_s: float, max_tokens: int
) -> list[BatchItem]:
    """Packs FIFO until the predicted attention time reaches ``quota_s``; looks no further.

    The request that would overflow is cut by binary search to what still fits (chunked prefill).
    ``max_tokens`` bounds cached + new over the batch (device memory). The first item always gets
    at least one token, so that a quota below one token's time still makes progress.
    """
    batch: list[BatchItem] = []
    spent = model.fixed_s
    tokens = 0
    for work in queue:
        room = max_tokens - tokens - work.cached
        most = min(work.remaining, room)
        budget = quota_s - spent

        def fits(new: int, cached: int = work.cached, budget: float = budget) -> bool:
            return model.increment(cached, new) <= budget

        new = largest(most, fits)
        if new == 0 and not batch and most > 0:
            new = 1
        if new > 0:
            batch.append(BatchItem(work.request_id, work.cached, new))
            spent += model.increment(work.cached, new)
            tokens += work.cached + new
        if new < work.remaining:
            break
    return batch


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest n in 0..most with ``fits(n)``, which must be monotone; 0 if none."""
    low, high = 0, max(most, 0)
    if high and fits(high):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
