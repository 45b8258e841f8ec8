"""One simulation from its configuration to its result."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

from kvtransfer.sim.agents import Script
from kvtransfer.sim.cluster import SimCluster
from kvtransfer.sim.config import SimConfig
from kvtransfer.sim.results import Recorder, SimResult

__all__ = ["simulate"]


def simulate(
    config: SimConfig,
    until: float = math.inf,
    progress: Callable[[], None] | None = None,
    work: list[Script] | None = None,
    since: float = 0.0,
) -> SimResult:
    """Deterministic: the same configuration gives the same result. ``progress`` is called with every
    finished turn; ``work`` takes the place of the configured workload. Turns submitted before ``since``
    aren't measured: the cluster fills up. Raises InvalidArgument for
    configurations that can't run."""
    recorder = Recorder(since)
    cluster = SimCluster(config, recorder, work)
    recorder.cluster = cluster
    collecting = gc.isenabled()
    gc.disable()  # turns make no cycles, and looking for some takes a twentieth of the time
    try:
        cluster.run(until, progress)
    finally:
        if collecting:
            gc.enable()
    return recorder.result()
