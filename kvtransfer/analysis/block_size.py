"""How many tokens a block should hold: the hit rate that larger ones lose, the bandwidth they gain.

A prefix can be restored in whole blocks only, so blocks of B tokens lose B / 2 tokens a turn on
average. A device reads larger files faster. The plan puts both into one number: the time until a
turn's prompt is in the cache, loading the hit and computing the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import InvalidArgument
from kvtransfer.workload import TraceSession

__all__ = [
    "ADAPTIVE",
    "BlockSizePlan",
    "DeviceCurve",
    "adaptive_block_tokens",
    "hit_tokens",
    "plan_block_size",
]

ADAPTIVE = 0  # in place of a block size: chosen by the context's length


def adaptive_block_tokens(context_tokens: int) -> int:
    """64 below 16k tokens of context, 128 below 64k, else 256."""
    if context_tokens < 16 << 10:
        return 64
    return 128 if context_tokens < 64 << 10 else 256


@dataclass(frozen=True)
class DeviceCurve:
    """GB/s that a device reads whole files with, by their size in bytes; between the points it is
    interpolated over the logarithm of the size, beyond them it stays as it is."""

    sizes: tuple[int, ...]
    gb_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        sorted_sizes = sorted(set(self.sizes)) == list(self.sizes)
        if not self.sizes or len(self.sizes) != len(self.gb_per_s) or not sorted_sizes:
            raise InvalidArgument("a device's curve needs as many speeds as sizes, smallest first")
        if min(self.sizes) < 1 or min(self.gb_per_s) <= 0:
            raise InvalidArgument("a device's sizes and speeds must be positive")

    def at(self, num_bytes: float) -> float:
        """GB/s for files of ``num_bytes``."""
        return float(np.interp(np.log(num_bytes), np.log(self.sizes), self.gb_per_s))


@dataclass(frozen=True)
class BlockSizePlan:
    """One block size (ADAPTIVE: by length) on one trace; means are over the turns."""

    block_tokens: int
    hit_rate: float  # of all input tokens
    blocks_per_turn: float
    block_bytes: float  # mean
    load_s: float
    compute_s: float

    @property
    def turn_s(self) -> float:
        """Load and compute one after the other: what cannot be hidden is an upper bound."""
        return self.load_s + self.compute_s


def hit_tokens(session: TraceSession, block_tokens: int) -> npt.NDArray[np.int64]:
    """Tokens of each turn's prompt that blocks of ``block_tokens`` (or ADAPTIVE) restore.

    What a turn shares with the turns before it is known in whole trace blocks; where it goes on with
    all of a prompt, to the token. Generated tokens that the next prompt repeats count as stored.
    """
    hits = np.zeros(len(session.turns), np.int64)
    trace_tokens = session.block_tokens
    stored: set[int] = set()
    sizes: list[int] = []
    previous = 0
    for i, turn in enumerate(session.turns):
        size = block_tokens or adaptive_block_tokens(turn.input_tokens)
        ids = turn.block_ids.tolist()
        shared = next((k for k, block in enumerate(ids) if block not in stored), len(ids))
        common = shared * trace_tokens
        # The last block of the turn before was not full yet: it is shared up to its last token.
        if common < turn.input_tokens and common // trace_tokens == previous // trace_tokens:
            common = min(previous, turn.input_tokens)
        if i and size in sizes:  # blocks of another size have other keys
            hits[i] = min(common, turn.input_tokens - 1) // size * size
        sizes.append(size)
        stored.update(ids)
        previous = turn.input_tokens
    return hits


def plan_block_size(
    sessions: Iterable[TraceSession],
    candidates: Sequence[int],
    bytes_per_token: int,
    device: DeviceCurve,
    compute_tokens_per_s: float,
) -> list[BlockSizePlan]:
    """One plan per candidate block size (ADAPTIVE among them), in their order.

    ``compute_tokens_per_s``: prefill speed for the tokens that were not restored. Raises
    InvalidArgument for sizes that are not positive and for a trace without turns.
    """
    if bytes_per_token < 1 or compute_tokens_per_s <= 0:
        raise InvalidArgument("bytes per token and prefill speed must be positive")
    if any(size < 0 for size in candidates):
        raise InvalidArgument(f"block sizes must be positive, got {list(candidates)}")
    traces = list(sessions)
    inputs = np.array([t.input_tokens for s in traces for t in s.turns], np.int64)
    if not len(inputs):
        raise InvalidArgument("the trace has no turns")
    plans = []
    for candidate in candidates:
        hits = np.concatenate([hit_tokens(session, candidate) for session in traces])
        sizes = np.array([candidate or adaptive_block_tokens(int(n)) for n in inputs])
        speeds = {size: device.at(size * bytes_per_token) * 1e9 for size in set(sizes.tolist())}
        rate = np.array([speeds[size] for size in sizes.tolist()])
        plans.append(
            BlockSizePlan(
                block_tokens=candidate,
                hit_rate=float(hits.sum() / inputs.sum()),
                blocks_per_turn=float((hits / sizes).mean()),
                block_bytes=float(sizes.mean() * bytes_per_token),
                load_s=float((hits * bytes_per_token / rate).mean()),
                compute_s=float((inputs - hits).mean() / compute_tokens_per_s),
            )
        )
    return plans
