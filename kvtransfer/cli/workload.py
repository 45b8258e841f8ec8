"""``kvtransfer workload``: look at traces and at what the generator makes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvtransfer.errors import InvalidArgument
from kvtransfer.workload import TABLE_2, describe, read_trace
from kvtransfer.workload.generator import trajectories

app = typer.Typer(help="Statistics of traces and generated workloads.", no_args_is_help=True)


@app.command()
def stats(
    files: Annotated[list[Path], typer.Argument(help="kvt-sessions-v1 or Mooncake JSONL")],
) -> None:
    """Turns, sizes and prefix hit rate of trace files."""
    table = Table(
        "file",
        "sessions",
        "requests",
        "turns",
        "context",
        "append",
        "generated",
        "total",
        "hit rate",
    )
    for file in files:
        s = describe(read_trace(file))
        table.add_row(
            file.name,
            f"{s.sessions}",
            f"{s.requests}",
            f"{s.turns_per_session:.1f}",
            f"{s.context_tokens:.0f}",
            f"{s.append_tokens:.0f}",
            f"{s.generated_tokens:.0f}",
            f"{s.total_tokens:.0f}",
            f"{s.hit_rate:.4f}",
        )
    Console().print(table)


@app.command()
def generated(
    spec: Annotated[str, typer.Argument(help="32k, 48k or 64k (paper Table 2)")] = "32k",
    count: int = 500,
    seed: int = 0,
) -> None:
    """Means of generated trajectories beside the paper's Table 2."""
    if spec not in TABLE_2:
        raise InvalidArgument(f"spec must be one of {', '.join(TABLE_2)}, got {spec!r}")
    want = TABLE_2[spec]
    made = trajectories(want, count, seed)
    rows = {
        "turns": (want.turns, np.mean([len(t.append) for t in made])),
        "append": (want.append, np.mean([t.append.mean() for t in made])),
        "generated": (want.generated, np.mean([t.generated.mean() for t in made])),
        "total": (want.total, np.mean([t.total for t in made])),
        "context": (want.context, np.mean([t.context.mean() for t in made])),
    }
    table = Table("mean of", "paper", "generated", "ratio")
    for name, (paper, ours) in rows.items():
        table.add_row(name, f"{paper:.0f}", f"{ours:.0f}", f"{ours / paper:.3f}")
    Console().print(table)
