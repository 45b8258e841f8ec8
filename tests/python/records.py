"""Made-up turns and runs for tests of what is computed from them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.messages import LogitsInfo
from kvtransfer.engine.replay import ReplayRun, TurnRecord


def make_config(**changes: Any) -> ClusterConfig:
    base: dict[str, Any] = {
        "name": "test",
        "store": "/tmp/nowhere",
        "namespace": "00" * 32,
        "layer_planes": [[8, 8]] * 4,
    }
    return ClusterConfig(**{**base, **changes})


def make_record(**changes: Any) -> TurnRecord:
    base: dict[str, Any] = {
        "session_id": "s",
        "session": 0,
        "turn": 0,
        "request_id": 1,
        "prompt": np.arange(130, dtype=np.uint32),
        "generated": np.arange(3, dtype=np.uint32),
        "read_path": "pe",
        "prefill": "pe0",
        "decode": "de0",
        "hit_blocks": 1,
        "expected_hit_blocks": 1,
        "chunks": 1,
        "pe_bytes": 1000,
        "de_bytes": 0,
        "ttft_s": 0.5,
        "load_s": 0.4,
        "exposed_s": 0.01,
        "decode_s": 0.1,
        "stall_s": (0.1, 0.1),
        "compute_s": (0.02, 0.03),
        "device_tokens": 130,
        "attempts": 1,
        "lives": 1,
        "failures": (),
        "fresh_blocks": (True, True),
        "logits": tuple(LogitsInfo(digest="", gap=0.5) for _ in range(3)),
    }
    return TurnRecord(**{**base, **changes})


def make_run(*records: TurnRecord, **changes: Any) -> ReplayRun:
    return ReplayRun(make_config(**changes), list(records), wall_s=2.0)
