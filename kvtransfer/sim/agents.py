"""Agents: trajectories of turns, started together or by a Poisson process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtransfer.analysis import hit_tokens
from kvtransfer.sim.config import Agents
from kvtransfer.workload import TABLE_2, read_trace
from kvtransfer.workload.generator import trajectories

__all__ = ["Script", "arrivals", "scripts"]


@dataclass(frozen=True)
class Script:
    """Per turn: tokens restored from the store, tokens to compute, tokens to generate, and seconds
    between the last turn's end and this one."""

    hit: list[int]
    new: list[int]
    generate: list[int]
    think: list[float]

    def __len__(self) -> int:
        return len(self.hit)


def scripts(agents: Agents, block_tokens: int) -> list[Script]:
    """The distinct trajectories; agent i follows number i modulo their count."""
    if agents.workload in TABLE_2:
        spec = TABLE_2[agents.workload]
        found: list[Script] = []
        for sizes in trajectories(spec, agents.trajectories, agents.seed):
            stored = np.concatenate([[0], np.cumsum(sizes.append + sizes.generated)[:-1]])
            # The last generated token has no KV yet.
            hits = np.maximum(stored - 1, 0) // block_tokens * block_tokens
            found.append(_script(hits, sizes.context - hits, sizes.generated, agents.max_turns))
        return found
    out: list[Script] = []
    for session in read_trace(Path(agents.workload)):
        if not session.turns or len(out) == agents.trajectories:
            continue
        hits = hit_tokens(session, block_tokens)
        inputs = np.array([turn.input_tokens for turn in session.turns])
        generated = np.array([max(turn.output_tokens, 1) for turn in session.turns])
        thinks = [turn.think_s or 0.0 for turn in session.turns] if agents.think_times else None
        out.append(_script(hits, inputs - hits, generated, agents.max_turns, thinks))
    return out


def _script(
    hits: npt.NDArray[np.int64],
    new: npt.NDArray[np.int64],
    generated: npt.NDArray[np.int64],
    max_turns: int,
    thinks: list[float] | None = None,
) -> Script:
    end = max_turns or len(hits)
    return Script(
        hits[:end].tolist(),
        new[:end].tolist(),
        generated[:end].tolist(),
        thinks[:end] if thinks else [0.0] * len(hits[:end]),
    )


def arrivals(agents: Agents) -> list[float]:
    """When each agent begins."""
    if agents.rate == 0:
        return [0.0] * agents.count
    rng = np.random.default_rng(agents.seed + 1)
    gaps = rng.exponential(1 / agents.rate, max(int(agents.rate * agents.seconds * 2), 16))
    times = np.cumsum(gaps)
    return [float(time) for time in times[times < agents.seconds]]
