"""Closed formulas about a workload, a model, a device and a cluster."""

from kvtransfer.analysis.block_size import (
    ADAPTIVE,
    BlockSizePlan,
    DeviceCurve,
    adaptive_block_tokens,
    hit_tokens,
    plan_block_size,
)
from kvtransfer.analysis.bottleneck import ClusterShape, Loads, RatioRange, loads, ratio_range
from kvtransfer.analysis.cluster_plan import ClusterPlan, TurnMeans, plan_cluster, turn_means
from kvtransfer.analysis.model_cost import MODEL_COSTS, ModelCost, cache_compute_ratio

__all__ = [
    "ADAPTIVE",
    "MODEL_COSTS",
    "BlockSizePlan",
    "ClusterPlan",
    "ClusterShape",
    "DeviceCurve",
    "Loads",
    "ModelCost",
    "RatioRange",
    "TurnMeans",
    "adaptive_block_tokens",
    "cache_compute_ratio",
    "hit_tokens",
    "loads",
    "plan_block_size",
    "plan_cluster",
    "ratio_range",
    "turn_means",
]
