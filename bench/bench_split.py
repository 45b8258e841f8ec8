"""Split reads against the better single side and against choosing a side, simulated.

Sweeps models, P/D, storage speed and the number of agents. Per configuration: mean time to the first
token and job completion of `split` over those of the best of `pe`, `de` and `auto` (above 1: faster).

    python bench/bench_split.py --json out/split.json
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvtransfer.sim import Agents, Hardware, SimConfig, simulate

MODES = ("pe", "de", "dualpath", "split")
Case = tuple[str, tuple[int, int], float, int]


def cases() -> list[Case]:
    small, large = ((1, 1), (2, 1), (1, 2), (2, 4)), ((2, 2), (4, 2), (2, 4), (4, 4))
    return [
        case
        for model, nodes in (("ds-27b", small), ("deepseek-v3.2", large), ("qwen2.5-32b", small))
        for case in product((model,), nodes, (50e9, 10e9), (1, 16, 64, 256))
    ]


def run(case: Case) -> dict[str, tuple[float, float]]:
    model, (prefill, decode), storage, count = case
    out = {}
    for mode in MODES:
        agents = Agents(workload="64k", count=count, trajectories=64, max_turns=24)
        config = SimConfig(
            model=model,
            prefill=prefill,
            decode=decode,
            mode=mode,
            hardware=Hardware(snic_bytes_per_s=storage),
            agents=agents,
        )
        result = simulate(config)
        out[mode] = (result.ttft_s.mean, result.jct_s)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes) as pool:
        results = list(pool.map(run, cases()))
    table = Table("model", "nodes", "SNIC GB/s", "agents", "TTFT best single s", "auto", "split")
    for name in ("TTFT gain", "JCT gain", "over auto"):
        table.add_column(name)
    rows = []
    for (model, nodes, storage, count), found in zip(cases(), results, strict=True):
        ttft = {mode: value for mode, (value, _) in found.items()}
        jct = {mode: value for mode, (_, value) in found.items()}
        single = min(ttft["pe"], ttft["de"])
        row = {
            "model": model,
            "nodes": f"{nodes[0]}P{nodes[1]}D",
            "snic_gb_per_s": storage / 1e9,
            "agents": count,
            "ttft_s": ttft,
            "jct_s": jct,
            "ttft_gain": single / ttft["split"],
            "jct_gain": min(jct["pe"], jct["de"]) / jct["split"],
            "jct_gain_over_auto": jct["dualpath"] / jct["split"],
        }
        rows.append(row)
        table.add_row(
            model,
            str(row["nodes"]),
            f"{storage / 1e9:.0f}",
            str(count),
            f"{single:.3f}",
            f"{ttft['dualpath']:.3f}",
            f"{ttft['split']:.3f}",
            *(f"{row[k]:.3f}" for k in ("ttft_gain", "jct_gain", "jct_gain_over_auto")),
        )
    Console(width=140).print(table)
    for name in ("ttft_gain", "jct_gain", "jct_gain_over_auto"):
        values = sorted(float(row[name]) for row in rows)  # type: ignore[arg-type]
        least, middle, most = values[0], values[len(values) // 2], values[-1]
        print(f"{name}: least {least:.3f}, median {middle:.3f}, most {most:.3f}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
