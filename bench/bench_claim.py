"""Workload: the default replay (two generated agent sessions, equal storage caps on every engine).

Runs `pe` and `auto` interleaved and prints the ratio of their wall times, pair by pair: the paper's
claim on one machine. The limit is the share of the bytes that the busier side reads, plus what
decoding adds between two loads of a session.

    python bench/bench_claim.py [--pairs 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def run_pair(folder: str) -> dict[str, float]:
    out = Path(folder) / "run.json"
    subprocess.run(
        [sys.executable, "-m", "kvtransfer.cli.main", "replay", "--json", str(out)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    pe, auto = json.loads(out.read_text())
    moved = auto["bytes_by_path"]
    return {
        "pe_wall_s": pe["wall_s"],
        "auto_wall_s": auto["wall_s"],
        "ratio": pe["wall_s"] / auto["wall_s"],
        "de_share": moved["de"] / (moved["pe"] + moved["de"]),
        "hidden_auto": auto["hidden"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pairs = []
    for number in range(options.pairs):
        with tempfile.TemporaryDirectory() as folder:
            pairs.append(run_pair(folder))
        p = pairs[-1]
        print(
            f"pair {number + 1}: pe {p['pe_wall_s']:.2f} s  auto {p['auto_wall_s']:.2f} s  "
            f"ratio {p['ratio']:.2f}x  {p['de_share']:.0%} of the bytes over the DE path",
            flush=True,
        )
    ratios = [p["ratio"] for p in pairs]
    print(
        f"median {statistics.median(ratios):.2f}x (min {min(ratios):.2f}, max {max(ratios):.2f}); "
        f"DE share {statistics.median(p['de_share'] for p in pairs):.0%}"
    )
    if options.json:
        options.json.write_text(json.dumps(pairs))


if __name__ == "__main__":
    main()
