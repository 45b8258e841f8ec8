"""The timeline of a replay: Chrome/Perfetto trace events, one track per engine and traffic kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvtransfer.engine.messages import Journal
from kvtransfer.engine.replay import ReplayRun

__all__ = ["KINDS", "TRACE_DTYPE", "trace_events", "write_trace"]

KINDS = ("storage_read", "storage_write", "device_copy", "network_read", "network_write")
TRACE_DTYPE = np.dtype(
    [
        ("begin_ns", "<i8"),
        ("end_ns", "<i8"),
        ("bytes", "<u8"),
        ("trace_id", "<u8"),
        ("layer", "<i4"),
        ("kind", "<i4"),
    ]
)
COMPUTE_TRACK, STALL_TRACK = len(KINDS), len(KINDS) + 1


def trace_events(run: ReplayRun) -> list[dict[str, Any]]:
    """Events with times in microseconds since the first one."""
    events = [event for name in sorted(run.journals) for event in _events(run.journals[name])]
    timed = [event["ts"] for event in events if event["ph"] == "X"]
    origin = min(timed, default=0.0)
    for event in events:
        if event["ph"] == "X":
            event["ts"] -= origin
    return events


def _events(journal: Journal) -> Iterator[dict[str, Any]]:
    engine = journal.engine
    yield {"ph": "M", "name": "process_name", "pid": engine, "args": {"name": engine}}
    for track, name in enumerate((*KINDS, "compute", "stall")):
        args = {"name": name}
        yield {"ph": "M", "name": "thread_name", "pid": engine, "tid": track, "args": args}
    for piece in np.frombuffer(journal.trace, TRACE_DTYPE):
        yield {
            "ph": "X",
            "name": f"{KINDS[piece['kind']]} layer {piece['layer']}",
            "pid": engine,
            "tid": int(piece["kind"]),
            "ts": float(piece["begin_ns"]) / 1e3,
            "dur": float(piece["end_ns"] - piece["begin_ns"]) / 1e3,
            "args": {"bytes": int(piece["bytes"]), "request": int(piece["trace_id"])},
        }
    for name, request, begin, end in journal.spans:
        yield {
            "ph": "X",
            "name": name,
            "pid": engine,
            "tid": STALL_TRACK if name.startswith("stall") else COMPUTE_TRACK,
            "ts": begin / 1e3,
            "dur": (end - begin) / 1e3,
            "args": {"request": request},
        }


def write_trace(run: ReplayRun, path: str | Path) -> None:
    """Writes a file that chrome://tracing and ui.perfetto.dev open."""
    Path(path).write_text(json.dumps({"traceEvents": trace_events(run)}))
