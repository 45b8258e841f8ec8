"""What a cluster of P prefill and D decode nodes makes of a workload, over one path and over both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtransfer.analysis.block_size import hit_tokens
from kvtransfer.analysis.bottleneck import ClusterShape, loads
from kvtransfer.analysis.model_cost import ModelCost
from kvtransfer.errors import InvalidArgument
from kvtransfer.workload import TraceSession

__all__ = ["ClusterPlan", "TurnMeans", "plan_cluster", "turn_means"]


@dataclass(frozen=True)
class TurnMeans:
    """An average turn: ``hit_tokens`` are loaded, ``miss_tokens`` computed behind them."""

    hit_tokens: float
    miss_tokens: float

    def __post_init__(self) -> None:
        if self.hit_tokens < 0 or self.miss_tokens <= 0:
            raise InvalidArgument(f"a turn needs tokens to compute, got {self}")


def turn_means(sessions: Iterable[TraceSession], block_tokens: int) -> TurnMeans:
    """Over all turns of a trace. Raises InvalidArgument for one without turns."""
    hits = inputs = turns = 0
    for session in sessions:
        hits += int(hit_tokens(session, block_tokens).sum())
        inputs += sum(turn.input_tokens for turn in session.turns)
        turns += len(session.turns)
    if not turns:
        raise InvalidArgument("the trace has no turns")
    return TurnMeans(hits / turns, (inputs - hits) / turns)


@dataclass(frozen=True)
class ClusterPlan:
    """Turns per second that each resource allows; the least is what the cluster can do.

    ``single_path`` and ``both_paths`` count storage and what else the loading loads (equations 1 to 8
    scale with the rate); ``prefill_compute`` is the prefill GPUs'. Decoding is not
    in it: it takes the same from either.
    """

    prefill: int
    decode: int
    single_path: float
    both_paths: float
    prefill_compute: float
    binding: str

    @property
    def gain(self) -> float:
        """Of both paths over the single one, by what the whole can do."""
        return min(self.both_paths, self.prefill_compute) / min(
            self.single_path, self.prefill_compute
        )


def plan_cluster(
    shape: ClusterShape,
    model: ModelCost,
    turn: TurnMeans,
    prefill: int,
    decode: int,
    gpu_flops_per_s: float,
) -> ClusterPlan:
    """``gpu_flops_per_s``: what prefill really gets out of one GPU (peak times utilisation)."""
    if gpu_flops_per_s <= 0:
        raise InvalidArgument("a GPU's speed must be positive")
    load_bytes = max(turn.hit_tokens * model.stored_bytes_per_token, 1.0)
    resource, share = loads(shape, prefill, decode).binding(shape)
    both = (prefill + decode) * shape.storage_bytes_per_s / share / load_bytes
    _, single_share = loads(shape, prefill, decode, de_path=False).binding(shape)
    single = prefill * shape.storage_bytes_per_s / single_share / load_bytes
    flops = model.forward_flops(turn.hit_tokens, turn.miss_tokens)
    compute = prefill * shape.gpus_per_node * gpu_flops_per_s / flops
    return ClusterPlan(
        prefill=prefill,
        decode=decode,
        single_path=single,
        both_paths=both,
        prefill_compute=compute,
        binding="prefill compute" if compute < both else resource,
    )
