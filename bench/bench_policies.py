"""Policies for choosing engines and the read path, simulated beside the paper's.

Sweeps models, P/D and what is short: storage, compute NICs, memory, buffers; on the generator's
trajectories and, with ``--trace``, on recorded sessions. Per policy: mean and 99th percentile of the
time to the first token and job completion, as the paper's policy over this one (above 1: faster).

    python bench/bench_policies.py --trace sessions.jsonl --json out/policies.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvtransfer.sim import Agents, Hardware, SimConfig, simulate

MODES = ("dualpath", "aware", "least_tokens", "affinity", "round_robin")
SHORT = {
    "nothing": Hardware(),
    "storage": Hardware(snic_bytes_per_s=10e9),
    "NICs": Hardware(cnic_bytes_per_s=8e9),
    "memory": Hardware(dram_bytes_per_s=80e9),
    "buffers": Hardware(snic_bytes_per_s=10e9, host_bytes=60e9),
}
Case = tuple[str, tuple[int, int], str, str]
Row = tuple[float, float, float]


def cases(workloads: list[str]) -> list[Case]:
    least = {"ds-27b": (1, 1), "deepseek-v3.2": (2, 2), "qwen2.5-32b": (1, 1)}
    return [
        case
        for model, nodes in least.items()
        for case in product((model,), (nodes, (2, 4)), SHORT, workloads)
    ]


def run(case: Case) -> dict[str, Row]:
    model, (prefill, decode), short, workload = case
    out = {}
    for mode in MODES:
        agents = Agents(workload=workload, count=96 * prefill, trajectories=64, max_turns=24)
        config = SimConfig(
            model=model,
            prefill=prefill,
            decode=decode,
            mode=mode,
            hardware=SHORT[short],
            agents=agents,
        )
        result = simulate(config)
        out[mode] = (result.ttft_s.mean, result.ttft_s.p99, result.jct_s)
    return out


def gains(row: dict[str, Row], mode: str) -> Row:
    mean, p99, jct = (a / b for a, b in zip(row["dualpath"], row[mode], strict=True))
    return mean, p99, jct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--trace", type=Path, action="append", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    swept = cases(["64k", *map(str, options.trace)])
    with ProcessPoolExecutor(options.processes) as pool:
        rows = dict(zip(swept, pool.map(run, swept), strict=True))
    table = Table(title="the paper's policy over this one: mean TTFT, p99 TTFT, job completion")
    for title in ("model", "P/D", "short of", "workload", *MODES[1:]):
        table.add_column(title)
    for (model, (prefill, decode), short, workload), row in rows.items():
        cells = [" ".join(f"{value:.2f}" for value in gains(row, mode)) for mode in MODES[1:]]
        table.add_row(model, f"{prefill}P{decode}D", short, Path(workload).stem, *cells)
    console = Console(width=140)
    console.print(table)
    for mode in MODES[1:]:
        parts = []
        for name, values in zip(
            ("mean TTFT", "p99 TTFT", "job completion"),
            zip(*(gains(row, mode) for row in rows.values()), strict=True),
            strict=True,
        ):
            low, middle, high = min(values), statistics.median(values), max(values)
            parts.append(f"{name} {low:.3f} .. {middle:.3f} .. {high:.3f}")
        console.print(f"{mode}: {'; '.join(parts)}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        keyed = {" ".join(map(str, case)): row for case, row in rows.items()}
        options.json.write_text(json.dumps(keyed))


if __name__ == "__main__":
    main()
