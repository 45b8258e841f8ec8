"""A recorded replay simulated: the same sessions, caps and path; its times predicted.

What the run computed in is taken from the run (a fit over its turns' compute times, the mean time of a
decode step). Loading, queueing, choosing and sharing are the simulator's.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from kvtransfer.analysis import ModelCost
from kvtransfer.errors import InvalidArgument
from kvtransfer.scheduler import AttentionTimeModel
from kvtransfer.sim.agents import Script
from kvtransfer.sim.config import Agents, Hardware, SimConfig
from kvtransfer.sim.run import simulate

__all__ = ["Prediction", "from_replay", "predict"]

MODES = {"pe": "pe", "de": "de", "auto": "dualpath", "split": "split"}
MEMORY_BYTES_PER_S = 2e9  # a core's copies: what an uncapped link between processes moves
FAST = 1e15


@dataclass(frozen=True)
class Prediction:
    """Time to the first token of one turn, in seconds, as it was and as it is simulated."""

    session: int
    turn: int
    recorded_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        return self.simulated_s / self.recorded_s - 1


def from_replay(run: dict[str, Any]) -> tuple[SimConfig, list[Script]]:
    """Of one run in a file of ``replay --json``. Raises InvalidArgument for anything else, and for a
    run without a cap on its storage (there is nothing to predict its disk by)."""
    try:
        return _from_replay(run)
    except (KeyError, TypeError, IndexError) as error:
        raise InvalidArgument(f"not a run of replay --json: {error!r}") from error


def _from_replay(run: dict[str, Any]) -> tuple[SimConfig, list[Script]]:
    config, records = run["config"], run["records"]
    if not config["storage_read_cap"]:
        raise InvalidArgument("the run had no --storage-mbps: its storage's rate isn't known")
    block = config["block_tokens"]
    sessions: dict[int, list[dict[str, Any]]] = defaultdict(list)
    samples = []
    for record in sorted(records, key=lambda r: (r["session"], r["turn"])):
        sessions[record["session"]].append(record)
        hit = record["hit_blocks"] * block
        samples.append((hit, record["prompt"] - hit, float(sum(record["compute_s"]))))
    time = AttentionTimeModel.fit(samples)
    steps = sum(len(record["generated"]) - 1 for record in records)
    kv_bytes = sum(sum(planes) for planes in config["layer_planes"])
    scripts = [
        Script(
            [record["hit_blocks"] * block for record in turns],
            [record["prompt"] - record["hit_blocks"] * block for record in turns],
            [len(record["generated"]) for record in turns],
            [0.0] * len(turns),
        )
        for _, turns in sorted(sessions.items())
    ]
    link = config["network_cap"] or MEMORY_BYTES_PER_S
    hardware = Hardware(
        gpus_per_node=1,
        cnic_bytes_per_s=link,
        snic_bytes_per_s=config["storage_read_cap"],
        dram_bytes_per_s=FAST,
        gpu_flops_per_s=1.0,  # the model's "FLOPs" are seconds
        prefill_utilisation=1.0,
        hbm_bytes_per_s=FAST,
        decode_utilisation=1.0,
        hbm_bytes=config["decode_tokens"] * kv_bytes,
        hbm_reserve=1e-9,
        host_bytes=config["pool_blocks"] * block * kv_bytes,
        storage_efficiency=1.0,
        forward_overhead_s=time.fixed_s,
        step_overhead_s=sum(record["decode_s"] for record in records) / max(steps, 1),
        turn_overhead_s=0.0,
    )
    model = ModelCost(
        name=config["model"],
        layers=len(config["layer_planes"]),
        kv_bytes_per_token=kv_bytes,
        flops_per_token=time.per_token_s,
        flops_per_pair=time.per_pair_s,
    )
    return (
        SimConfig(
            custom_model=model,
            prefill=config["num_prefill"],
            decode=config["num_decode"],
            mode=MODES[config["path"]],
            block_tokens=block,
            quota_s=config["quota_s"],
            fetch_period_s=1e-3,
            hardware=hardware,
            agents=Agents(count=len(scripts)),
        ),
        scripts,
    )


def predict(run: dict[str, Any]) -> list[Prediction]:
    """Every turn of a recorded run that loaded something."""
    config, work = from_replay(run)
    result = simulate(config, work=work)
    simulated = {(s.agent, s.index): s.first_token - s.submitted for s in result.stages}
    numbers = sorted({record["session"] for record in run["records"]})
    return [
        Prediction(
            record["session"],
            record["turn"],
            record["ttft_s"],
            simulated[numbers.index(record["session"]), record["turn"]],
        )
        for record in run["records"]
        if record["hit_blocks"]
    ]
