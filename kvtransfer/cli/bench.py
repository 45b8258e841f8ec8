"""``kvtransfer bench``: what parts cost, each beside what it is compared with."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvtransfer.cli import bench_ring, bench_store

app = typer.Typer(
    help="Benchmarks; every row names its unit and its limit or peer.", no_args_is_help=True
)


app.command("ring")(bench_ring.ring)
app.command("store")(bench_store.store)


@app.command()
def keys(
    blocks: int = 2000,
    block_tokens: int = 64,
    repeats: int = 15,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Block-key chaining: microseconds per block, compiled and in plain Python."""
    import numpy as np

    from kvtransfer.keys import chain_in_python, chain_keys

    tokens = np.arange(blocks * block_tokens, dtype=np.uint32)
    data, out = tokens.view(np.uint8), np.empty(blocks * 32, np.uint8)
    rows = _interleave(
        {
            "chain_keys": lambda: chain_keys(bytes(32), tokens, block_tokens),
            "plain Python": lambda: chain_in_python(bytes(32), data, 4 * block_tokens, out),
        },
        repeats,
    )
    result = {name: [1e6 * t / blocks for t in times] for name, times in rows.items()}
    _print("us per block", result)
    if json_file is not None:
        json_file.write_text(json.dumps(result))


def _interleave(cases: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, call in cases.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return times


def _print(unit: str, result: dict[str, list[float]]) -> None:
    table = Table("case", f"median {unit}", "min", "max", "ratio to the last row")
    last = statistics.median(list(result.values())[-1])
    for name, values in result.items():
        middle = statistics.median(values)
        table.add_row(
            name,
            f"{middle:.2f}",
            f"{min(values):.2f}",
            f"{max(values):.2f}",
            f"{middle / last:.2f}",
        )
    Console().print(table)
