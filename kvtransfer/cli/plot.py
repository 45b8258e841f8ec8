"""``kvtransfer plot``: a trace file as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtransfer.errors import ModelError, WorkloadError

COLORS = {
    "storage_read": "#4477aa",
    "storage_write": "#66ccee",
    "device_copy": "#228833",
    "network_read": "#ccbb44",
    "network_write": "#ee6677",
    "compute": "#333333",
    "stall": "#cccccc",
}


def plot(
    trace: Annotated[Path, typer.Argument(help="file written by replay --trace")],
    out: Annotated[
        Path | None, typer.Option(help="PNG to write (default: beside the trace)")
    ] = None,
    start_s: Annotated[float, typer.Option(help="from this second")] = 0.0,
    seconds: Annotated[float, typer.Option(help="so many seconds; 0: all")] = 0.0,
) -> None:
    """Draw a trace: one row per engine and traffic kind, so that the overlap can be seen."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ModelError(
            f"plot needs matplotlib: pip install 'kvtransfer[plot]' ({error})"
        ) from error
    rows = _rows(trace)
    end_s = (
        start_s + seconds
        if seconds > 0
        else max((ts + dur for bars in rows.values() for ts, dur in bars), default=0.0)
    )
    figure, axes = plt.subplots(figsize=(14, 0.42 * len(rows) + 1.2))
    for y, ((_, kind), bars) in enumerate(rows.items()):
        shown = [(ts, max(dur, 1e-4)) for ts, dur in bars if ts + dur >= start_s and ts <= end_s]
        axes.broken_barh(shown, (y - 0.4, 0.8), facecolors=COLORS.get(kind, "#999999"))
    axes.set_yticks(range(len(rows)), [f"{engine} {kind}" for engine, kind in rows])
    axes.invert_yaxis()
    axes.set_xlim(start_s, end_s)
    axes.set_xlabel("seconds since the first event")
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    target = out or trace.with_suffix(".png")
    figure.savefig(target, dpi=110)
    print(target)


def _rows(trace: Path) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(engine, track) -> [(start, duration)] in seconds; empty tracks are left out."""
    try:
        events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
        names = {
            (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
        }
        rows: dict[tuple[str, str], list[tuple[float, float]]] = {
            (pid, name): [] for (pid, _), name in sorted(names.items())
        }
        for e in events:
            if e["ph"] == "X":
                key = (e["pid"], names[e["pid"], e["tid"]])
                rows[key].append((e["ts"] / 1e6, e["dur"] / 1e6))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorkloadError(f"{trace}: not a trace of ours: {error!r}") from error
    return {key: bars for key, bars in rows.items() if bars}
