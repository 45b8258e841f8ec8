"""A discrete-event simulator of the whole system that drives the live scheduler (section 5)."""

from kvtransfer.sim.cluster import SimCluster
from kvtransfer.sim.config import MODES, Agents, Hardware, Mode, SimConfig, read_config
from kvtransfer.sim.results import Recorder, SimResult
from kvtransfer.sim.run import simulate

__all__ = [
    "MODES",
    "Agents",
    "Hardware",
    "Mode",
    "Recorder",
    "SimCluster",
    "SimConfig",
    "SimResult",
    "read_config",
    "simulate",
]
