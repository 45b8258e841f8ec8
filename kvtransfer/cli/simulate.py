"""``kvtransfer simulate``: a cluster that isn't there, run by the scheduler that is."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvtransfer.errors import InvalidArgument

if TYPE_CHECKING:
    from kvtransfer.sim import SimConfig, SimResult

__all__ = ["simulate", "sweep_configs"]

UPDATE_EVERY = 500  # turns


def simulate(
    config: Annotated[
        Path | None, typer.Argument(help="TOML; without it the paper's DS-27B on 1P1D")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="FIELD=A,B,...: mode, prefill, decode, block_tokens, agents.count, ..."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="stop at this simulated second; 0: at the end")
    ] = 0,
    warm_up: Annotated[
        float, typer.Option(help="turns before this simulated second aren't measured")
    ] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write all results here")] = None,
    html: Annotated[Path | None, typer.Option(help="write a report with figures, one file")] = None,
    like: Annotated[
        Path | None, typer.Option(help="predict the runs of this file of `replay --json` instead")
    ] = None,
) -> None:
    """Simulate agents on a cluster; every combination of the sweeps is one run.

    The same configuration gives the same result. Exit code 2: bad input.
    """
    from kvtransfer.sim import SimConfig, read_config

    for option, value in (("seconds", seconds), ("warm-up", warm_up)):
        if value < 0:
            raise InvalidArgument(f"--{option} must not be negative, got {value}")
    if like is not None:
        _show_predictions(like)
        return
    base = read_config(config) if config is not None else SimConfig()
    runs = sweep_configs(base, sweep or [])
    console = Console()
    results = [_run(console, label, one, seconds, warm_up) for label, one in runs]
    labels = [label for label, _ in runs]
    wide = console if console.is_terminal else Console(width=150)
    wide.print(_table(labels, results))
    if json_file is not None:
        rows = [{"label": n, **r.to_json()} for n, r in zip(labels, results, strict=True)]
        json_file.write_text(json.dumps(rows))
    if html is not None:
        from kvtransfer.cli.simulate_report import write_report

        write_report(html, labels, results)
        console.print(f"report: {html}")


def _show_predictions(file: Path) -> None:
    """Times to first tokens of recorded runs beside what the simulator says."""
    from kvtransfer.sim.recorded import predict

    try:
        runs = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"--like {file}: {error}") from error
    if not isinstance(runs, list) or not runs:
        raise InvalidArgument(f"--like {file}: not a file of replay --json")
    table = Table(title=f"{file.name}: time to the first token", title_justify="left")
    for name in ("path", "turns", "recorded s", "simulated s", "median error", "90 % within"):
        table.add_column(name, justify="right")
    for run in runs:
        found = predict(run)
        if not found:
            raise InvalidArgument(f"--like {file}: no turn of it loaded anything")
        errors = sorted(abs(p.error) for p in found)
        table.add_row(
            run["config"]["path"],
            f"{len(found)}",
            f"{sum(p.recorded_s for p in found) / len(found):.3f}",
            f"{sum(p.simulated_s for p in found) / len(found):.3f}",
            f"{errors[len(errors) // 2]:.1%}",
            f"{errors[int(len(errors) * 0.9)]:.1%}",
        )
    Console().print(table)


def sweep_configs(base: SimConfig, sweeps: list[str]) -> list[tuple[str, SimConfig]]:
    """(label, configuration) of every combination; the base alone without sweeps.

    Raises InvalidArgument for fields that aren't there and values that don't fit.
    """
    fields, choices = [], []
    for text in sweeps:
        name, _, values = text.partition("=")
        if not name or not values:
            raise InvalidArgument(f"--sweep must read FIELD=A,B, got {text!r}")
        fields.append(name)
        choices.append(values.split(","))
    found = []
    for chosen in product(*choices):
        data = msgspec.to_builtins(base)
        for name, value in zip(fields, chosen, strict=True):
            _set(data, name, value)
        try:
            config = msgspec.convert(data, type(base), strict=False)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"--sweep {', '.join(sweeps)}: {error}") from error
        varied = [
            value if name == "mode" else f"{name}={value}"
            for name, value, offered in zip(fields, chosen, choices, strict=True)
            if len(offered) > 1
        ]
        label = " ".join(varied) or config.mode
        found.append((label, config))
    return found


def _set(data: dict[str, Any], name: str, value: str) -> None:
    *path, last = name.split(".")
    inner: Any = data
    for part in path:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or last not in inner:
        raise InvalidArgument(f"--sweep: the configuration has no field {name!r}")
    inner[last] = value


def _run(
    console: Console, label: str, config: SimConfig, seconds: float, warm_up: float
) -> SimResult:
    from kvtransfer.sim import simulate as run
    from kvtransfer.sim.agents import scripts

    agents = config.agents
    lengths = [len(script) for script in scripts(agents, config.block_tokens)]
    total = None
    if agents.rate == 0 and not seconds:
        whole, rest = divmod(agents.count, len(lengths))
        total = whole * sum(lengths) + sum(lengths[:rest])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(label, total=total)
        done = 0

        def tick() -> None:
            nonlocal done
            done += 1
            if done % UPDATE_EVERY == 0:
                progress.update(task, completed=done)

        return run(config, seconds or float("inf"), tick, since=warm_up)


def _table(labels: list[str], results: list[SimResult]) -> Table:
    table = Table(title="simulated", title_justify="left")
    for name in ("run", "nodes", "agents", "turns", "JCT s", "TTFT s mean", "p90", "TPOT ms"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for name in ("load s", "queue s", "SNIC PE", "SNIC DE", "SNIC max/avg", "PE busy"):
        table.add_column(name, justify="right")
    for label, result in zip(labels, results, strict=True):
        config = result.config
        table.add_row(
            label,
            f"{config['prefill']}P{config['decode']}D",
            f"{result.agents}",
            f"{result.turns}",
            f"{result.jct_s:.0f}",
            f"{result.ttft_s.mean:.2f}",
            f"{result.ttft_s.p90:.2f}",
            f"{result.tpot_s.mean * 1e3:.1f}",
            f"{result.load_s.mean:.2f}",
            f"{result.queue_s.mean:.2f}",
            *(f"{_mean_utilisation(result, kind):.0%}" for kind in ("pe", "de")),
            f"{result.snic_balance:.2f}",
            f"{result.prefill_utilisation:.0%}",
        )
    return table


def _mean_utilisation(result: SimResult, kind: str) -> float:
    values = [v for name, v in result.snic_utilisation.items() if name.startswith(kind)]
    return sum(values) / len(values)
