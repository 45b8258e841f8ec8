"""Sessions with token ids: what the replay serves."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import InvalidArgument
from kvtransfer.workload.traces import TraceSession

__all__ = ["Session", "Turn", "derive_tokens", "from_trace"]

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Turn:
    """``append`` follows the first ``keep`` tokens of the session so far.

    The session so far is the previous prompt and what was really generated after it; ``keep`` None
    keeps all of it (an agent that goes on with its own output), a number cuts it (a recorded trace,
    whose next prompt holds the recorded output). Exactly ``generate`` tokens are then decoded.
    """

    append: Tokens
    generate: int
    keep: int | None = None

    def prompt(self, so_far: Tokens) -> Tokens:
        kept = so_far if self.keep is None else so_far[: self.keep]
        return np.concatenate([kept, self.append]).astype(np.uint32)


@dataclass(frozen=True)
class Session:
    session_id: str
    turns: tuple[Turn, ...]


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser over an array (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def derive_tokens(
    scope: str, block_ids: npt.ArrayLike, tokens_per_block: int, vocab_size: int
) -> Tokens:
    """Token ids for trace blocks: equal (scope, id) give equal tokens, in every process.

    Returns ``[len(block_ids) * tokens_per_block]`` ids below ``vocab_size``.
    """
    seed = np.frombuffer(hashlib.sha256(scope.encode()).digest()[:8], np.uint64)[0]
    ids = _mix(np.asarray(block_ids, np.int64).astype(np.uint64) ^ seed)
    offsets = np.arange(tokens_per_block, dtype=np.uint64)
    mixed = _mix((ids[:, None] + offsets[None, :] * np.uint64(0x632BE59BD9B4E019)).reshape(-1))
    return (mixed % np.uint64(vocab_size)).astype(np.uint32)


def from_trace(
    trace: TraceSession, vocab_size: int, *, scale: int = 1, max_turns: int | None = None
) -> Session:
    """Gives an id-only trace session its tokens. ``scale`` divides every length (blocks keep their
    identity: a trace block of 64 tokens becomes 64 / scale)."""
    if not 1 <= scale <= trace.block_tokens or trace.block_tokens % scale:
        raise InvalidArgument(f"scale must divide the trace's block of {trace.block_tokens} tokens")
    per_block = trace.block_tokens // scale
    scope = "global" if trace.global_ids else trace.session_id
    turns: list[Turn] = []
    previous = np.empty(0, np.uint32)
    for index, turn in enumerate(trace.turns[:max_turns]):
        body = derive_tokens(scope, turn.block_ids, per_block, vocab_size)
        tail_length = max((turn.input_tokens % trace.block_tokens) // scale, 0 if len(body) else 1)
        tail = derive_tokens(f"{trace.session_id}/tail/{index}", [0], tail_length, vocab_size)
        prompt = np.concatenate([body, tail])
        keep = _common_prefix(previous, prompt)
        turns.append(Turn(prompt[keep:], max(turn.output_tokens // scale, 1), keep))
        previous = prompt
    return Session(trace.session_id, tuple(turns))


def _common_prefix(a: Tokens, b: Tokens) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if different.size else length
