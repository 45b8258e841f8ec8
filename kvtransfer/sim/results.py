"""What a simulation measured."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvtransfer.errors import InvalidArgument
from kvtransfer.sim.turn import Turn

if TYPE_CHECKING:
    from kvtransfer.sim.cluster import SimCluster

__all__ = ["Recorder", "SimResult", "Spread", "Stage"]

WINDOW_S = 10.0
KEPT_STAGES = 2000


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles, in the unit of what they are of."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: npt.NDArray[np.float64]) -> Spread:
        if not len(values):
            return cls(0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        return cls(float(values.mean()), float(p50), float(p90), float(p99))


@dataclass(frozen=True)
class Stage:
    """A turn's times, for a picture of it."""

    agent: int
    index: int
    submitted: float
    assigned: float
    loaded: float
    prefill_begin: float
    first_token: float
    landed: float
    done: float
    prefill: str
    decode: str
    hit: int
    decode_tokens: int


@dataclass
class SimResult:
    """``jct_s``: until the last turn was done. ``ttft_s`` from submission to the first token,
    ``tpot_s`` per further token, ``load_s`` from assignment until the prefix is in the buffers.
    ``snic_balance`` and ``attention_balance``: per window of 10 s the largest over the mean of the
    nodes' bytes, of the prefill GPUs' computing; the mean over the windows. ``snic_rates``: bytes/s
    per window and node. ``agents``: how many began."""

    config: dict[str, Any]
    jct_s: float
    turns: int
    agents: int
    events: int
    ttft_s: Spread
    tpot_s: Spread
    load_s: Spread
    queue_s: Spread
    snic_balance: float
    attention_balance: float
    snic_utilisation: dict[str, float]
    prefill_utilisation: float
    windows_s: list[float] = field(default_factory=list)
    snic_rates: dict[str, list[float]] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Recorder:
    """Collects turns as they end; those submitted before ``since`` aren't measured. Memory: 32 bytes a
    turn."""

    def __init__(self, since: float = 0.0) -> None:
        self._since = since
        self._ttft, self._tpot = array("d"), array("d")
        self._load, self._queue = array("d"), array("d")
        self.stages: list[Stage] = []
        self._snapshots: list[tuple[float, list[int], list[float]]] = []
        self._next_window = WINDOW_S
        self.cluster: SimCluster

    def add(self, turn: Turn) -> None:
        now = turn.done
        if now >= self._next_window:
            self._snapshot(now)
            self._next_window = (now // WINDOW_S + 1) * WINDOW_S
        if turn.submitted < self._since:
            return
        self._ttft.append(turn.first_token - turn.submitted)
        if turn.generate > 1:
            self._tpot.append((turn.done - turn.first_token) / (turn.generate - 1))
        self._load.append(turn.loaded - turn.assigned)
        self._queue.append(turn.assigned - turn.submitted)
        if len(self.stages) < KEPT_STAGES:
            self.stages.append(_stage(turn))

    def _snapshot(self, now: float) -> None:
        cluster = self.cluster
        reads = [node.read_tokens for node in cluster.nodes]
        busy = [gpu.busy_s for gpu in cluster.prefill.values()]
        self._snapshots.append((now, reads, busy))

    def result(self) -> SimResult:
        """Raises InvalidArgument when no turn has ended."""
        cluster = self.cluster
        if not self._ttft:
            raise InvalidArgument("the simulation ended before the first turn to be measured did")
        jct = cluster.kernel.now
        self._snapshot(jct)
        times = np.array([0.0] + [time for time, _, _ in self._snapshots])
        reads = np.array([[0] * len(cluster.nodes)] + [row for _, row, _ in self._snapshots])
        busy = np.array([[0.0] * len(cluster.prefill)] + [row for _, _, row in self._snapshots])
        seconds = np.maximum(np.diff(times), 1e-9)
        kv, hardware = cluster.config.cost.stored_bytes_per_token, cluster.config.hardware
        rates = np.diff(reads, axis=0) * kv / seconds[:, None]
        used = [i for i, node in enumerate(cluster.nodes) if node.read_tokens]
        names = [node.name for node in cluster.nodes]
        total = {n: float(r * kv / jct) for n, r in zip(names, reads[-1], strict=True)}
        return SimResult(
            config=msgspec.to_builtins(cluster.config),
            jct_s=jct,
            turns=len(self._ttft),
            agents=cluster.begun_agents,
            events=cluster.kernel.events,
            ttft_s=Spread.of(np.asarray(self._ttft)),
            tpot_s=Spread.of(np.asarray(self._tpot)),
            load_s=Spread.of(np.asarray(self._load)),
            queue_s=Spread.of(np.asarray(self._queue)),
            snic_balance=_balance(rates[:, used]),
            attention_balance=_balance(np.diff(busy, axis=0)),
            snic_utilisation={n: r / hardware.snic_bytes_per_s for n, r in total.items()},
            prefill_utilisation=float(busy[-1].sum() / len(cluster.prefill) / jct),
            windows_s=times[1:].tolist(),
            snic_rates={name: rates[:, i].tolist() for i, name in enumerate(names)},
            stages=self.stages,
        )


def _stage(turn: Turn) -> Stage:
    return Stage(
        turn.agent,
        turn.index,
        turn.submitted,
        turn.assigned,
        turn.loaded,
        turn.prefill_begin,
        turn.first_token,
        turn.landed,
        turn.done,
        turn.prefill.name,
        turn.decode.name,
        turn.hit,
        turn.decode_tokens,
    )


def _balance(rows: npt.NDArray[np.float64]) -> float:
    """Mean over the windows of largest / mean; 1 is even. Idle windows don't count."""
    if rows.shape[1] < 2:
        return 1.0
    means = rows.mean(axis=1)
    busy = means > 0.05 * max(float(means.max()), 1e-300)
    return float((rows[busy].max(axis=1) / means[busy]).mean()) if busy.any() else 1.0
