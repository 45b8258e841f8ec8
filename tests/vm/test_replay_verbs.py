"""Whole clusters over real queue pairs, each engine on a device of its own, tokens verified."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtransfer.engine.cluster import new_cluster_name
from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.reference import verify_replay
from kvtransfer.engine.replay import run_replay
from kvtransfer.models import load_model, namespace_of
from kvtransfer.workload import TABLE_2, generate


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """So small that an emulated machine computes with it."""
    folder = tmp_path_factory.mktemp("model")
    from make_model import save

    save(folder)
    return str(folder)


def config(model: str, store: Path, **changes: object) -> ClusterConfig:
    loaded = load_model(model)
    fields: dict[str, object] = {
        "name": new_cluster_name(),
        "model": model,
        "block_tokens": 16,
        "namespace": namespace_of(loaded, 16).digest().hex(),
        "layer_planes": loaded.layer_planes,
        "store": str(store),
        "transport": "verbs",
        "verbs_devices": ["rxe0", "rxe1"],
        "pool_blocks": 96,
        "prefill_tokens": 2048,
        "decode_tokens": 4096,
        "deadline_s": 60.0,
        "journal": True,
    }
    return ClusterConfig(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "engines", "changes"),
    [
        ("pe", 1, {}),
        ("de", 1, {}),
        ("auto", 1, {"copy": "nic"}),
        ("pe", 2, {}),
        ("de", 2, {"verbs_queue_pairs": 2}),
        ("auto", 2, {}),
    ],
)
def test_tokens_over_verbs_are_those_of_a_run_without_any_cache(
    model: str, tmp_path: Path, path: str, engines: int, changes: dict[str, object]
) -> None:
    sessions = generate(TABLE_2["32k"], 2, 128, seed=2, scale=160, max_turns=3)
    settings = config(
        model, tmp_path, path=path, num_prefill=engines, num_decode=engines, **changes
    )
    run = run_replay(settings, sessions)
    report = verify_replay(run)
    assert run.lost == {}
    assert report.ok
    assert report.differences == []
    assert report.rows_different == []
    assert report.tokens_checked > 0
    assert all(r.hit_blocks == r.expected_hit_blocks for r in run.records)
    assert any(record.hit_blocks > 0 for record in run.records)
    for name, journal in run.journals.items():
        ring = journal.counters["ring"]["kv"]
        if name.startswith("pe") and any(r.prefill == name for r in run.records):
            assert ring["work_requests"] > 0
            assert ring["doorbells"] < ring["work_requests"]
        assert journal.counters["ring"]["model"]["work_requests"] == 0


def test_a_batch_of_32_is_one_call_into_the_device(tmp_path: Path) -> None:
    """Counted by strace at the provider's write calls, not by our own counter."""
    calls = {}
    for batch in (1, 32):
        log = tmp_path / f"strace-{batch}"
        strace = ["strace", "-f", "-e", "trace=write", "-o", str(log), sys.executable]
        script = Path(__file__).with_name("post_batches.py")
        subprocess.run([*strace, str(script), str(batch)], check=True, timeout=120)
        # Soft-RoCE's doorbell: one write of 32 bytes to the device file.
        calls[batch] = sum(") = 32" in line for line in log.read_text().splitlines())
    assert calls[1] >= 640
    assert calls[32] <= calls[1] / 32 + 8
