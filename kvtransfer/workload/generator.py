"""Seeded agentic sessions fitted to the paper's Table 2.

The table's means are per trajectory: turns x (append + generated) is 1.6-1.7 times the mean total,
so turn counts and per-turn sizes are anti-correlated. The generator draws a total length T and a
number of turns N independently and divides T by N. With N lognormal, E[N] E[1/N] = exp(sigma^2)
gives sigma from the table; the share of T in the first prompt follows from the mean context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import InvalidArgument
from kvtransfer.workload.sessions import Session, Turn, derive_tokens

__all__ = ["TABLE_2", "AgenticSpec", "Trajectory", "generate", "trajectories"]


@dataclass(frozen=True)
class AgenticSpec:
    """Means over trajectories, in tokens (paper Table 2)."""

    max_length: int
    turns: float
    append: float
    generated: float
    total: float
    context: float


TABLE_2 = {
    "32k": AgenticSpec(32 << 10, 60, 608, 148, 28_639, 17_183),
    "48k": AgenticSpec(48 << 10, 106, 474, 172, 42_607, 25_120),
    "64k": AgenticSpec(64 << 10, 157, 429, 176, 55_958, 32_721),
}

BETA_CONCENTRATION = 8.0
MIN_TURNS = 2


@dataclass(frozen=True)
class Trajectory:
    """Sizes only: ``append[i]`` tokens, then ``generated[i]``."""

    append: npt.NDArray[np.int64]
    generated: npt.NDArray[np.int64]

    @property
    def context(self) -> npt.NDArray[np.int64]:
        """Tokens in the prompt of each turn."""
        both = np.cumsum(self.append + self.generated)
        return both - self.generated

    @property
    def total(self) -> int:
        return int(self.append.sum() + self.generated.sum())


def trajectories(spec: AgenticSpec, count: int, seed: int) -> list[Trajectory]:
    """``count`` trajectories. Turn counts and totals are stratified over their distributions, so
    that the means hold for any seed and moderate ``count``."""
    if count < 1:
        raise InvalidArgument(f"count must be positive, got {count}")
    rng = np.random.default_rng(seed)
    per_turn = spec.append + spec.generated
    sigma = math.sqrt(math.log(max(spec.turns * per_turn / spec.total, 1.0)))
    mu = math.log(spec.turns) - sigma**2 / 2
    strata = (np.arange(count) + 0.5) / count
    normal = np.array([NormalDist().inv_cdf(float(q)) for q in rng.permutation(strata)])
    turns = np.maximum(np.rint(np.exp(mu + sigma * normal)), MIN_TURNS).astype(int)
    totals = _beta_totals(spec, rng, rng.permutation(strata))
    return [_trajectory(spec, rng, int(n), float(t)) for n, t in zip(turns, totals, strict=True)]


def _beta_totals(
    spec: AgenticSpec, rng: np.random.Generator, quantiles: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    mean = spec.total / spec.max_length
    sample = np.sort(rng.beta(BETA_CONCENTRATION * mean, BETA_CONCENTRATION * (1 - mean), 100_000))
    values = sample[(quantiles * len(sample)).astype(int)]
    return np.asarray(values * spec.max_length * (mean / float(values.mean())))


def _trajectory(
    spec: AgenticSpec, rng: np.random.Generator, turns: int, total: float
) -> Trajectory:
    total = min(total, spec.max_length)
    generated_total = total * spec.generated / (spec.append + spec.generated)
    # Mean context = total * (first + (1 - first) / 2) for steady growth after the first prompt.
    first = max(2 * spec.context / spec.total - 1, 0.0)
    shares = rng.dirichlet(np.full(turns, 2.0)) * (1 - first)
    append = shares * (total - generated_total)
    append[0] += first * (total - generated_total)
    generated = rng.dirichlet(np.full(turns, 2.0)) * generated_total
    return Trajectory(_whole(append), _whole(generated))


def _whole(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Integers >= 1 with the same running sum."""
    edges = np.rint(np.cumsum(values)).astype(np.int64)
    return np.maximum(np.diff(edges, prepend=0), 1)


def generate(
    spec: AgenticSpec,
    count: int,
    vocab_size: int,
    *,
    seed: int = 0,
    scale: int = 1,
    max_turns: int | None = None,
) -> list[Session]:
    """Sessions with token ids. ``scale`` divides every length; what is generated is kept."""
    if scale < 1:
        raise InvalidArgument(f"scale must be positive, got {scale}")
    sessions = []
    for index, sizes in enumerate(trajectories(spec, count, seed)):
        name = f"agent-{seed}-{index}"
        turns = []
        for i, (append, generated) in enumerate(
            zip(sizes.append[:max_turns], sizes.generated[:max_turns], strict=True)
        ):
            tokens = derive_tokens(f"{name}/{i}", [0], max(int(append) // scale, 1), vocab_size)
            turns.append(Turn(tokens, max(int(generated) // scale, 1)))
        sessions.append(Session(name, tuple(turns)))
    return sessions
