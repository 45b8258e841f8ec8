"""The closed formulas against the paper's figures and against sums over every pair and arrow."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.analysis import (
    MODEL_COSTS,
    ClusterShape,
    TurnMeans,
    cache_compute_ratio,
    loads,
    plan_cluster,
    ratio_range,
)
from kvtransfer.analysis.bottleneck import pair_rates
from kvtransfer.errors import InvalidArgument

GB = 1e9


def hopper(gpus: int = 8, s: float = 1, dram: float = 500) -> ClusterShape:
    return ClusterShape(gpus, 50 * GB, s * 50 * GB, dram * GB)


shapes = st.builds(
    ClusterShape,
    st.integers(1, 16),
    st.floats(1e9, 1e11),
    st.floats(1e9, 4e11),
    st.floats(1e10, 2e12),
)


@pytest.mark.parametrize(
    ("shape", "lower", "upper"),
    [
        (hopper(), 1 / 7, 7 / 2),
        (hopper(dram=400), 1 / 7, 5 / 2),
        (hopper(dram=300), 1 / 7, 3 / 2),
        (hopper(dram=250), 1 / 7, 1),
        (hopper(s=2), 1 / 3, 1),
        (hopper(gpus=4), 1 / 3, 3 / 2),
    ],
)
def test_the_ranges_of_the_paper(shape: ClusterShape, lower: float, upper: float) -> None:
    found = ratio_range(shape)
    assert found.feasible
    assert found.lower == pytest.approx(lower)
    assert found.upper == pytest.approx(upper)


@pytest.mark.parametrize(
    ("prefill", "decode", "shares", "dram"),
    [
        (2, 4, (0.25, 0.375, 0.3125, 0.25), 200),
        (1, 2, (0.25, 0.375, 0.3125, 0.25), 200),
        (1, 1, (0.25, 0.25, 0.375, 0.375), 250),
        (2, 1, (0.25, 0.1875, 0.5, 0.625), 350),
    ],
)
def test_the_loads_of_the_paper(
    prefill: int, decode: int, shares: tuple[float, ...], dram: float
) -> None:
    found = loads(hopper(), prefill, decode)
    cnic = (found.pe_cnic_read, found.pe_cnic_write, found.de_cnic_read, found.de_cnic_write)
    assert [value / (50 * GB) for value in cnic] == pytest.approx(shares)
    assert found.de_dram == pytest.approx(dram * GB)
    assert found.pe_dram == pytest.approx(100 * GB)


# The arrows of figure 4 that touch a resource, per byte of hit KV. PE path: storage -> PE buffer (1, 2,
# not a CNIC's), 3: PE buffer read, 4: into the PE device, 5: read from the device, 6: written into the
# DE buffer (7, 8: to the DE device). DE path: storage -> DE buffer, 3: read, 5: into the PE device,
# 6: DE buffer read again, 7: into the DE device.
PE_PATH = Counter(
    {
        "pe_cnic_read": 2,  # buffer -> device, device -> DE buffer
        "pe_cnic_write": 1,  # into the device
        "de_cnic_read": 1,  # DE buffer -> DE device
        "de_cnic_write": 2,  # into the DE buffer, into the DE device
        "pe_dram": 2,  # storage writes it, the CNIC reads it
        "de_dram": 2,  # the PE's CNIC writes it, the DE's reads it
    }
)
DE_PATH = Counter(
    {
        "pe_cnic_write": 1,  # DE buffer -> PE device
        "de_cnic_read": 2,  # to the PE, to the DE device
        "de_cnic_write": 1,  # into the DE device
        "de_dram": 3,  # storage writes it, read for the PE, read for the DE
    }
)


@given(shapes, st.integers(1, 6), st.integers(1, 6))
def test_the_loads_are_the_sums_over_all_pairs_and_arrows(
    shape: ClusterShape, prefill: int, decode: int
) -> None:
    g = shape.gpus_per_node
    rate_p, rate_c = pair_rates(shape, prefill, decode)
    total: Counter[tuple[str, int]] = Counter()
    single: Counter[tuple[str, int]] = Counter()
    storage: Counter[tuple[str, int]] = Counter()
    for pe in range(prefill * g):
        for de in range(decode * g):
            storage["pe", pe // g] += rate_p
            storage["de", de // g] += rate_c
            for arrows, rate in ((PE_PATH, rate_p), (DE_PATH, rate_c)):
                for resource, times in arrows.items():
                    gpu = pe if resource.startswith("pe") else de
                    unit = gpu // g if resource.endswith("dram") else gpu
                    total[resource, unit] += times * rate
                    single[resource, unit] += times * rate * (arrows is PE_PATH)
    found = loads(shape, prefill, decode)
    for (resource, _), value in total.items():
        assert value == pytest.approx(getattr(found, resource)), resource
    alone = loads(shape, prefill, decode, de_path=False)
    for (resource, _), value in single.items():
        assert value == pytest.approx(getattr(alone, resource)), resource
    for value in storage.values():
        assert value == pytest.approx(shape.storage_bytes_per_s), "every SNIC is full"


@given(shapes, st.floats(0.05, 20))
def test_within_the_range_nothing_but_storage_binds_and_outside_something_does(
    shape: ClusterShape, ratio: float
) -> None:
    found = ratio_range(shape)
    shares = loads(shape, ratio, 1).shares(shape)
    margin = max(abs(value - 1) for value in shares.values())
    if min(abs(value - 1) for value in shares.values()) < 1e-6 or margin < 1e-6:
        return  # on an edge
    fits = all(value <= 1 for value in shares.values())
    assert (found.feasible and found.lower <= ratio <= found.upper) == fits
    name, share = loads(shape, ratio, 1).binding(shape)
    assert (name == "storage NICs") == fits
    assert share == pytest.approx(max(1.0, *shares.values()))


def test_the_ratios_that_fit_are_listed_in_lowest_terms() -> None:
    assert ratio_range(hopper(dram=250)).ratios(4) == [(1, 3), (1, 2), (1, 1)]
    assert not ratio_range(hopper(gpus=1)).feasible
    assert ratio_range(hopper(gpus=1)).ratios(9) == []


@pytest.mark.parametrize("bad", [(0, 1, 1, 1), (8, 0, 1, 1), (8, 1, -1, 1), (8, 1, 1, math.inf)])
def test_impossible_shapes_are_refused(bad: tuple[int, float, float, float]) -> None:
    with pytest.raises(InvalidArgument, match="must be positive"):
        ClusterShape(*bad)
    with pytest.raises(InvalidArgument, match="prefill and decode nodes"):
        loads(hopper(), 0, 1)


# Table 1: GB per PFLOP at 16K and 64K tokens of context, 429 appended.
@pytest.mark.parametrize(
    ("model", "low", "high", "within"),
    [
        ("qwen2.5-32b", 117, 267, 0.01),
        ("gpt-oss-120b", 47, 95, 0.02),
        ("qwen3-235b", 39, 60, 0.01),
        ("deepseek-v3.2", 13, 36, 0.08),
        ("deepseek-v3", 4.8, 5.8, 0.12),
    ],
)
def test_cache_compute_ratios_of_table_1(
    model: str, low: float, high: float, within: float
) -> None:
    cost = MODEL_COSTS[model]
    for context, paper in ((16 << 10, low), (64 << 10, high)):
        assert cache_compute_ratio(cost, 429, context) * 1e6 == pytest.approx(paper, rel=within)


@pytest.mark.parametrize("cost", MODEL_COSTS.values(), ids=MODEL_COSTS.keys())
def test_costs_grow_with_work(cost: object) -> None:
    assert isinstance(cost, type(MODEL_COSTS["ds-27b"]))
    assert cost.forward_flops(1000, 0) == 0
    assert cost.forward_flops(1000, 10) < cost.forward_flops(2000, 10)
    assert cost.forward_flops(1000, 10) < cost.forward_flops(1000, 11)
    # A long prefill costs what its chunks cost (the mean context stands for the sum).
    whole = cost.forward_flops(8000, 4000)
    assert whole == pytest.approx(cost.forward_flops(8000, 1000) + cost.forward_flops(9000, 3000))
    assert cost.weight_bytes > 0


def test_the_gain_is_that_of_the_storage_until_something_else_binds() -> None:
    turn = TurnMeans(32_000, 429)
    model = MODEL_COSTS["ds-27b"]
    plenty = plan_cluster(hopper(), model, turn, 1, 2, 1e18)
    assert plenty.gain == pytest.approx(3)
    assert plenty.binding == "storage NICs"
    slow = plan_cluster(hopper(), model, turn, 1, 2, 1e12)
    assert slow.gain == 1
    assert slow.binding == "prefill compute"
    crowded = plan_cluster(hopper(dram=200), model, turn, 2, 1, 1e18)
    assert crowded.binding == "DE DRAM"
    assert crowded.gain == pytest.approx(1.5 * 200 / 350)


def run_plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtransfer.cli.main", "plan", "cluster"]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, timeout=100
    )


def test_the_command_says_what_the_formulas_say(tmp_path: Path) -> None:
    done = run_plan("--json", "--prefill", "1", "--decode", "2", "--model", "ds-27b")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["shares"]["DE CNIC read"] == pytest.approx(0.3125)
    assert result["range"]["upper"] == pytest.approx(3.5)
    assert result["gain"] > 1
    shown = run_plan("--prefill", "8", "--decode", "1")
    assert "8.000 is outside" in " ".join(shown.stdout.split())
    assert "binds" in shown.stdout
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loads.png"
    assert run_plan("--plot", str(picture)).returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (("--model", "gpt-9"), "--model"),
        (("--prefill", "0"), "prefill and decode nodes"),
        (("--dram-gb-per-s", "-1"), "must be positive"),
        (("/nowhere.jsonl",), "nowhere"),
    ],
)
def test_bad_plans_are_refused(bad: tuple[str, ...], why: str) -> None:
    done = run_plan(*bad)
    assert done.returncode == 2
    assert why in done.stderr
