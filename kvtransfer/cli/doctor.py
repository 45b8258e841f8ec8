"""``kvtransfer doctor``: will it work here, with what, and if not, why not."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvtransfer.errors import InvalidArgument

__all__ = ["doctor"]

KNOWN = ("shm", "verbs", "uring")


def doctor(
    require: Annotated[
        str, typer.Option(help="exit 1 unless these work, with commas: shm, verbs, uring")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show devices, memory limits and kernel features, which transports will work, and fixes."""
    wanted = set(filter(None, require.split(",")))
    if not wanted <= set(KNOWN):
        raise InvalidArgument(f"--require must be of {', '.join(KNOWN)}, got {require!r}")
    from kvtransfer.doctor import examine, usable

    findings = examine()
    works = usable(findings) | {"uring" for f in findings if f.name == "io_uring" and f.ok}
    missing = sorted(wanted - works)
    if as_json:
        print(json.dumps({"findings": [asdict(f) for f in findings], "missing": missing}))
    else:
        table = Table("group", "what", "ok", "found", "fix")
        for f in findings:
            mark = {True: "yes", False: "no", None: ""}[f.ok]
            table.add_row(f.group, f.name, mark, f.found, f.fix)
        console = Console()
        (console if console.is_terminal else Console(width=160)).print(table)
        for name in missing:
            print(f"required, but does not work here: {name}")
    if missing:
        raise typer.Exit(1)
