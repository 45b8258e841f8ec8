"""``kvtransfer store``: look at, check, shrink and move a block store."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvtransfer.errors import InvalidArgument

if TYPE_CHECKING:
    from kvtransfer.store import BlockStore

__all__ = ["app"]

app = typer.Typer(
    help="Look at, check, shrink and move a block store; engines may use it meanwhile.",
    no_args_is_help=True,
)

Root = Annotated[Path, typer.Argument(help="the store's directory")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@app.command()
def stat(root: Root, as_json: Json = False) -> None:
    """Blocks, bytes, chains, ages and what the store is for."""
    import numpy as np

    from kvtransfer.maintenance import tree_depths

    store = _open(root)
    keys, parents, times = store.list()
    depths = tree_depths(keys, parents, store.name_space)
    layout = store.layout
    ages = time.time() - times / 1e9
    with_children = {parent.tobytes() for parent in parents}
    result = {
        "root": str(root),
        "namespace": store.name_space.hex(),
        "layout": str(layout),
        "block_tokens": layout.block_tokens,
        "file_bytes": store.file_bytes,
        "blocks": len(keys),
        "bytes": len(keys) * store.file_bytes,
        "tokens": len(keys) * layout.block_tokens,
        "chains": sum(key.tobytes() not in with_children for key in keys),
        "longest_chain": int(depths.max(initial=-1)) + 1,
        "unreachable": int((depths < 0).sum()),
        "oldest_s": round(float(ages.max(initial=0)), 1),
        "median_age_s": round(float(np.median(ages)), 1) if len(ages) else 0.0,
        "newest_s": round(float(ages.min(initial=1e18)), 1) if len(ages) else 0.0,
        "direct_io": store.direct_io,
    }
    _show(result, as_json)


@app.command()
def ls(
    root: Root,
    as_json: Json = False,
    limit: Annotated[int, typer.Option(help="most blocks shown; 0: all")] = 50,
) -> None:
    """Blocks, newest first: key, parent, position in its chain, age."""
    import numpy as np

    from kvtransfer.maintenance import tree_depths

    if limit < 0:
        raise InvalidArgument(f"--limit must be 0 or more, got {limit}")
    store = _open(root)
    keys, parents, times = store.list()
    depths = tree_depths(keys, parents, store.name_space)
    order = np.argsort(times)[::-1]
    shown = order[:limit] if limit else order
    rows = [
        {
            "key": keys[i].tobytes().hex(),
            "parent": parents[i].tobytes().hex(),
            "position": int(depths[i]),
            "age_s": round(time.time() - int(times[i]) / 1e9, 1),
        }
        for i in shown
    ]
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        where = row["position"] if int(str(row["position"])) >= 0 else "unreachable"
        print(f"{row['key']}  {where:>11}  {row['age_s']:>10.1f} s")
    if len(shown) < len(order):
        print(f"... and {len(order) - len(shown)} more (--limit 0 shows all)")


@app.command()
def verify(
    root: Root,
    remove: Annotated[bool, typer.Option("--remove", help="remove what doesn't verify")] = False,
    as_json: Json = False,
) -> None:
    """Read every block and check size, header and checksums; exit 1 if one is bad."""
    from kvtransfer.maintenance import verify_store

    store = _open(root)
    begin = time.perf_counter()
    with _progress("verify") as report:
        found = verify_store(store, remove, report)
    seconds = time.perf_counter() - begin
    total = found.good + len(found.bad)
    result = {
        "good": found.good,
        "bad": len(found.bad),
        "removed": len(found.bad) if remove else 0,
        "unreachable": found.unreachable,
        "gb_per_s": round(total * store.file_bytes / max(seconds, 1e-9) / 1e9, 3),
    }
    if as_json:
        print(json.dumps({**result, "files": [{"path": p, "why": w} for p, w in found.bad]}))
    else:
        for path, why in found.bad:
            print(f"{path}: {why}")
        _show(result, False)
    if found.bad:
        raise typer.Exit(1)


@app.command()
def gc(
    root: Root,
    max_bytes: Annotated[str, typer.Option(help="evict to this, e.g. 500G")] = "",
    keep_free: Annotated[str, typer.Option(help="evict until so much is free, e.g. 20G")] = "",
    stale_s: Annotated[int, typer.Option(help="age from which temporaries are swept")] = 300,
    as_json: Json = False,
) -> None:
    """Sweep what dead writers left; evict, least recently used leaves first, to a size."""
    from kvtransfer.store import BlockStore

    store = BlockStore.open_existing(
        str(root),
        max_bytes=_bytes("max-bytes", max_bytes),
        free_space_floor=_bytes("keep-free", keep_free),
        stale_temporary_seconds=stale_s,
    )
    before = store.stats()["blocks"]
    store.evict()
    stats = store.stats()
    result = {
        "blocks_before": before,
        "blocks": stats["blocks"],
        "bytes": stats["bytes"],
        "evicted": stats["evicted"],
        "unremovable": stats["unremovable"],
        "swept_temporaries": stats["swept_temporaries"],
    }
    _show(result, as_json)
    if stats["unremovable"]:
        raise typer.Exit(1)


@app.command("export")
def export_command(
    root: Root,
    out: Annotated[Path, typer.Argument(help="a tar file, or - for standard output")],
    as_json: Json = False,
) -> None:
    """Write all blocks that verify to a tar, parents before children."""
    from kvtransfer.maintenance import export_store

    store = _open(root)
    with _progress("export") as report:
        if str(out) == "-":
            count = export_store(store, sys.stdout.buffer, report)
        else:
            partial = out.with_name(out.name + ".partial")
            try:
                with partial.open("wb") as file:
                    count = export_store(store, file, report)
                partial.rename(out)
            finally:
                partial.unlink(missing_ok=True)
    if str(out) != "-":
        _show({"exported": count, "file": str(out)}, as_json)


@app.command("import")
def import_command(
    root: Root,
    source: Annotated[Path, typer.Argument(help="a tar of `export`, or - for standard input")],
    as_json: Json = False,
) -> None:
    """Add the blocks of an export; each is verified before it can be found."""
    from kvtransfer.maintenance import import_store

    with _progress("import") as report:
        if str(source) == "-":
            added, there = import_store(str(root), sys.stdin.buffer, report)
        else:
            with source.open("rb") as file:
                added, there = import_store(str(root), file, report)
    _show({"added": added, "already_there": there}, as_json)


def _open(root: Path) -> BlockStore:
    from kvtransfer.store import BlockStore

    return BlockStore.open_existing(str(root), stale_temporary_seconds=1 << 30)


def _bytes(option: str, text: str) -> int:
    """``500G`` -> bytes; 0 for nothing."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    number = text[: len(text) - len(unit)]
    if not text:
        return 0
    if unit not in UNITS or not number.replace(".", "", 1).isdigit():
        raise InvalidArgument(f"--{option} must read like 500G (K, M, G, T), got {text!r}")
    return int(float(number) * UNITS[unit])


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as p:
        task = p.add_task(what, total=None)
        yield lambda done, total: p.update(task, completed=done, total=total or None)


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    width = max(len(name) for name in result)
    for name, value in result.items():
        print(f"{name.replace('_', ' '):{width}}  {value}")
