"""The smallest ClusterConfig that a test of processes needs."""

from __future__ import annotations

from kvtransfer.engine.cluster import new_cluster_name
from kvtransfer.engine.config import ClusterConfig

__all__ = ["config"]


def config(**changes: object) -> ClusterConfig:
    fields: dict[str, object] = {
        "name": new_cluster_name(),
        "store": "/tmp/unused",
        "namespace": "00" * 32,
        "layer_planes": [[4]],
        **changes,
    }
    return ClusterConfig(**fields)  # type: ignore[arg-type]
