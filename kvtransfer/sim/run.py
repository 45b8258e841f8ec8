"""One simulation from its configuration to its result."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvtransfer.sim.cluster import SimCluster
from kvtransfer.sim.config import SimConfig
from kvtransfer.sim.results import Recorder, SimResult

__all__ = ["simulate"]


def simulate(
    config: SimConfig, until: float = math.inf, progress: Callable[[], None] | None = None
) -> SimResult:
    """Deterministic: the same configuration gives the same result. ``progress`` is called with every
    finished turn. Raises InvalidArgument for configurations that can't run."""
    recorder = Recorder()
    cluster = SimCluster(config, recorder)
    recorder.cluster = cluster
    cluster.run(until, progress)
    return recorder.result()
