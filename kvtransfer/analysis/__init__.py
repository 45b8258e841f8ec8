"""Closed formulas about a workload, a model and a device."""

from kvtransfer.analysis.block_size import (
    ADAPTIVE,
    BlockSizePlan,
    DeviceCurve,
    adaptive_block_tokens,
    hit_tokens,
    plan_block_size,
)

__all__ = [
    "ADAPTIVE",
    "BlockSizePlan",
    "DeviceCurve",
    "adaptive_block_tokens",
    "hit_tokens",
    "plan_block_size",
]
