"""What a simulation is told: hardware, model, mode, agents. Read from TOML."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from kvtransfer.analysis import MODEL_COSTS, ClusterShape, ModelCost
from kvtransfer.errors import InvalidArgument
from kvtransfer.scheduler import Balance
from kvtransfer.workload import TABLE_2

__all__ = ["MODES", "Agents", "Hardware", "Mode", "SimConfig", "read_config", "weights_per_gpu"]


EXPERT_NODES = 4


class Hardware(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A node and its GPUs; the defaults are the paper's Hopper testbed.

    ``*_efficiency`` and ``*_utilisation`` are shares of the peaks that are really got: the few free
    parameters, with the two overheads (docs/reproduction.md says how they were fitted).
    """

    gpus_per_node: int = 8
    cnic_bytes_per_s: float = 50e9
    snic_bytes_per_s: float = 50e9
    dram_bytes_per_s: float = 500e9
    gpu_flops_per_s: float = 989e12
    hbm_bytes_per_s: float = 3.35e12
    hbm_bytes: float = 80e9
    hbm_reserve: float = 0.1  # of the HBM: activations, buffers; customary, not fitted
    host_bytes: float = 1e12  # a node's PE or DE buffers together
    prefill_utilisation: float = 0.35
    decode_utilisation: float = 0.093  # of weights and selected KV: experts apart, sparse attention
    dense_utilisation: float = 0.5  # of KV that is read whole; customary, not fitted
    storage_efficiency: float = 0.53
    forward_overhead_s: float = 0.0  # of a prefill batch
    step_overhead_s: float = 0.016  # of a decode step
    turn_overhead_s: float = 0.05  # of a turn: tool call, messages, sampling

    @property
    def shape(self) -> ClusterShape:
        return ClusterShape(
            self.gpus_per_node,
            self.cnic_bytes_per_s,
            self.snic_bytes_per_s * self.storage_efficiency,
            self.dram_bytes_per_s,
        )


class Mode(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How the cluster loads and schedules."""

    path: Literal["pe", "de", "auto", "split"] = "auto"
    layerwise: bool = True
    balance: Balance = "paper"
    free_io: bool = False  # all loading and moving takes no time


# The paper's ablation and its two ends, other choices of engines, single sides, and split reads.
MODES = {
    "basic": Mode("pe", layerwise=False, balance="round_robin"),
    "layerwise": Mode("pe", balance="round_robin"),
    "round_robin": Mode("auto", balance="round_robin"),
    "dualpath": Mode("auto"),
    "aware": Mode("auto", balance="aware"),
    "least_tokens": Mode("auto", balance="least_tokens"),
    "affinity": Mode("auto", balance="affinity"),
    "pe": Mode("pe"),
    "de": Mode("de"),
    "split": Mode("split"),
    "aware_split": Mode("split", balance="aware"),
    "oracle": Mode("pe", free_io=True),
}


class Agents(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Offline (``rate`` 0): ``count`` agents from the start, each submits its next turn when the last
    is done. Online: they arrive as a Poisson process of ``rate`` per second for ``seconds``."""

    workload: str = "64k"  # of the generator's specifications, or a trace file
    count: int = 512
    rate: float = 0.0
    seconds: float = 600.0
    trajectories: int = 500
    max_turns: int = 0  # 0: all
    think_times: bool = False  # of a trace
    seed: int = 1


class SimConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One simulation."""

    model: str = "ds-27b"
    custom_model: ModelCost | None = None  # in its place
    prefill: int = 1
    decode: int = 1
    mode: str = "dualpath"
    block_tokens: int = 64
    quota_s: float = 0.3
    fetch_period_s: float = 0.01
    hardware: Hardware = Hardware()
    agents: Agents = Agents()

    def __post_init__(self) -> None:
        if self.model not in MODEL_COSTS:
            raise InvalidArgument(f"model must be of {', '.join(MODEL_COSTS)}, got {self.model!r}")
        if self.mode not in MODES:
            raise InvalidArgument(f"mode must be of {', '.join(MODES)}, got {self.mode!r}")
        if not (1 <= self.prefill <= 4096 and 1 <= self.decode <= 4096):
            raise InvalidArgument(f"needs 1 to 4096 nodes a side: {self.prefill}P{self.decode}D")
        positive = {
            **{name: getattr(self.hardware, name) for name in Hardware.__struct_fields__},
            "block_tokens": self.block_tokens,
            "quota_s": self.quota_s,
            "fetch_period_s": self.fetch_period_s,
            "agents.count": self.agents.count,
            "agents.trajectories": self.agents.trajectories,
            "agents.seconds": self.agents.seconds,
        }
        for name, value in positive.items():
            if value < 0 or (value == 0 and not name.endswith("overhead_s")):
                raise InvalidArgument(f"{name} must be positive, got {value}")
        if self.agents.rate < 0 or self.agents.max_turns < 0:
            raise InvalidArgument("agents.rate and agents.max_turns must not be negative")
        room = self.hardware.hbm_bytes * (1 - self.hardware.hbm_reserve)
        for side, nodes in (("prefill", self.prefill), ("decode", self.decode)):
            weights = weights_per_gpu(self, nodes)
            if weights >= room:
                raise InvalidArgument(
                    f"{self.cost.name} doesn't fit {nodes} {side} node(s): {weights / 1e9:.0f} GB of "
                    f"weights a GPU, which has {room / 1e9:.0f} GB for them and KV"
                )
        known = self.agents.workload in TABLE_2 or Path(self.agents.workload).is_file()
        if not known:
            raise InvalidArgument(
                f"agents.workload must be of {', '.join(TABLE_2)} or a trace file, got "
                f"{self.agents.workload!r}"
            )

    @property
    def cost(self) -> ModelCost:
        return self.custom_model or MODEL_COSTS[self.model]

    @property
    def how(self) -> Mode:
        return MODES[self.mode]


def weights_per_gpu(config: SimConfig, nodes: int) -> float:
    """Bytes: experts lie spread over a side's nodes, up to ``EXPERT_NODES`` of them."""
    gpus = config.hardware.gpus_per_node * min(nodes, EXPERT_NODES)
    return config.cost.weight_bytes / gpus


def read_config(path: Path) -> SimConfig:
    """Raises InvalidArgument with the field that is wrong."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=SimConfig)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, InvalidArgument) as error:
        raise InvalidArgument(f"{path}: {error}") from error
