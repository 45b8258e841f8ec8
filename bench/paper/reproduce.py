"""Every result of the paper's evaluation beside what the simulator says.

    python bench/paper/reproduce.py            # all but the largest: about 25 minutes on two cores
    python bench/paper/reproduce.py --scale    # 48P96D with 48,000 agents, too: 15 minutes more

Results are kept in out/paper/*.json, by what was simulated, and not simulated again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
from points import ABLATION, BALANCE, EQUALITIES, OFFLINE, ONLINE, SCALE, Online, Point

from kvtransfer.sim import Agents, SimConfig, simulate

OUT = Path("out/paper")
TTFT_S = 4.0
ONLINE_S = 5400.0  # several times what an agent takes
WARM_UP_S = 3600.0  # by then agents end as fast as they come, if the cluster keeps up
RATE_STEP = 0.02
MOST_STEPS = 50


def run(config: SimConfig, until: float = float("inf"), since: float = 0.0) -> dict[str, float]:
    """What is asked of one simulation, from the cache if it was there."""
    text = json.dumps([msgspec.to_builtins(config), until, *([since] if since else [])])
    file = OUT / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    if file.exists():
        return dict(json.loads(file.read_text()))
    begin = time.process_time()
    result = simulate(config, until, since=since)
    row = {
        "jct_s": result.jct_s,
        "turns": result.turns,
        "ttft_s": result.ttft_s.mean,
        "tpot_s": result.tpot_s.mean,
        "queue_s": result.queue_s.mean,
        "snic_balance": result.snic_balance,
        "attention_balance": result.attention_balance,
        "cpu_s": time.process_time() - begin,
    }
    OUT.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(row))
    return row


def capacity(online: Online, mode: str) -> tuple[float, float]:
    """The highest rate of agents, in steps, that keeps the mean TTFT within the SLO, and the mean TPOT
    there."""
    rows: dict[int, dict[str, float]] = {}

    def keeps(step: int) -> bool:
        agents = Agents(workload="64k", rate=round(step * RATE_STEP, 3), seconds=ONLINE_S)
        config = SimConfig(
            model=online.model,
            prefill=online.nodes[0],
            decode=online.nodes[1],
            mode=mode,
            agents=agents,
        )
        rows[step] = run(config, ONLINE_S, WARM_UP_S)
        return rows[step]["ttft_s"] <= TTFT_S

    low, high = 0, MOST_STEPS
    while low < high:
        middle = (low + high + 1) // 2
        if keeps(middle):
            low = middle
        else:
            high = middle - 1
    return low * RATE_STEP, rows[low]["tpot_s"] if low else 0.0


def offline_lines(points: list[Point], rows: dict[str, dict[str, float]]) -> list[str]:
    lines = ["| what | paper s | simulated s | error |", "|---|---|---|---|"]
    for point in points:
        seconds = rows[point.name]["jct_s"]
        mark = " (fitted)" if point.fitted else ""
        error = seconds / point.paper - 1
        lines.append(f"| {point.name}{mark} | {point.paper:.0f} | {seconds:.0f} | {error:+.0%} |")
    return lines


def summary(points: list[Point], rows: dict[str, dict[str, float]]) -> list[str]:
    def errors(chosen: list[Point]) -> list[float]:
        return [abs(rows[p.name]["jct_s"] / p.paper - 1) for p in chosen]

    lines = []
    for title, chosen in (
        ("fitted on", [p for p in points if p.fitted]),
        ("that follow", [p for p in points if not p.fitted]),
    ):
        found = errors(chosen)
        lines.append(
            f"- {len(found)} points {title}: median error {statistics.median(found):.1%}, largest "
            f"{max(found):.1%}, beyond 25 %: {sum(e > 0.25 for e in found)}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", action="store_true", help="48P96D, too")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT / "reproduction.md")
    options = parser.parse_args()
    points = OFFLINE + (SCALE if options.scale else SCALE[:1])
    with ProcessPoolExecutor(options.processes) as pool:
        heavy_first = sorted(points, key=lambda p: -p.config.agents.count)
        futures = {p.name: pool.submit(run, p.config) for p in heavy_first}
        ablation = {mode: pool.submit(run, config) for mode, _, config in ABLATION}
        capacities = {
            (online.name, mode): pool.submit(capacity, online, mode)
            for online in ONLINE
            for mode in ("dualpath", "basic")
        }
        rows = {name: future.result() for name, future in futures.items()}
    lines = [*summary(points, rows), "", *offline_lines(points, rows), ""]
    lines += ["| P/D equality | simulated s | difference |", "|---|---|---|"]
    for left, right in EQUALITIES:
        a, b = rows[left]["jct_s"], rows[right]["jct_s"]
        lines.append(f"| {left} ~ {right} | {a:.0f}, {b:.0f} | {b / a - 1:+.1%} |")
    basic = rows["deepseek-v3.2 2P4D 64k 1024 basic"]["jct_s"]
    lines += ["", "| ablation | paper | simulated |", "|---|---|---|"]
    for mode, percent, _ in ABLATION:
        simulated = 100 * (1 - ablation[mode].result()["jct_s"] / basic)
        lines.append(f"| {mode} | -{percent} % | {-simulated:.1f} % |")
    lines += ["", "| online | paper agents/s | simulated | ratio (paper) | TPOT there |"]
    lines += ["|---|---|---|---|---|"]
    for online in ONLINE:
        dual, dual_tpot = capacities[online.name, "dualpath"].result()
        single, single_tpot = capacities[online.name, "basic"].result()
        ratio = dual / single if single else float("inf")
        lines.append(
            f"| {online.name} | {online.dual_path} vs {online.basic} | {dual:.2f} vs {single:.2f} "
            f"| {ratio:.2f} ({online.dual_path / online.basic:.2f}) "
            f"| {dual_tpot * 1e3:.0f} and {single_tpot * 1e3:.0f} ms |"
        )
    lines += ["", "| SNIC max/avg | paper | simulated |", "|---|---|---|"]
    for mode, paper in BALANCE:
        value = ablation[mode].result()["snic_balance"]
        lines.append(f"| {mode} | {paper} | {value:.2f} |")
    if options.scale:
        a, b = (rows[point.name]["jct_s"] for point in SCALE)
        lines.append(f"\n2P4D and 48P96D: {a:.0f} and {b:.0f} s, {b / a - 1:+.1%}")
    text = "\n".join(lines)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
