"""Real clusters in processes of their own, small enough for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtransfer.engine.cluster import new_cluster_name
from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.reference import VerifyReport, verify_replay
from kvtransfer.engine.replay import ReplayRun, run_replay
from kvtransfer.models import load_model, namespace_of
from kvtransfer.workload import TABLE_2, Session, generate


def make_config(store: Path, **changes: Any) -> ClusterConfig:
    model = load_model("tiny", changes.get("dtype", "float32"))
    base: dict[str, Any] = {
        "name": new_cluster_name(),
        "namespace": namespace_of(model, 64).digest().hex(),
        "layer_planes": model.layer_planes,
        "store": str(store),
        "pool_blocks": 96,
        "prefill_tokens": 4096,
        "decode_tokens": 8192,
        "deadline_s": 20.0,
        "journal": True,
    }
    return ClusterConfig(**{**base, **changes})


def make_sessions(count: int = 2, turns: int = 4, scale: int = 16) -> list[Session]:
    return generate(TABLE_2["32k"], count, 1024, seed=1, scale=scale, max_turns=turns)


def serve_and_verify(
    config: ClusterConfig, sessions: list[Session], **hooks: Any
) -> tuple[ReplayRun, VerifyReport]:
    run = run_replay(config, sessions, **hooks)
    return run, verify_replay(run)
