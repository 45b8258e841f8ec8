"""``kvtransfer plan``: choices that follow from a model, a device and a workload."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvtransfer.errors import InvalidArgument

if TYPE_CHECKING:
    from kvtransfer.analysis import DeviceCurve

__all__ = ["app"]

app = typer.Typer(help="Plans from a model, a device and a workload.", no_args_is_help=True)

# KV bytes per token of all layers, and a prefill speed per GPU to go with it.
MODELS = {
    "deepseek-v3.2": (61 * 656, 8000.0),
    "qwen2.5-32b": (64 * 2 * 8 * 128 * 2, 5000.0),
    "smollm2": (30 * 2 * 3 * 64 * 2, 1000.0),
}
MODEL_NAMES = (
    "qwen2.5-32b",
    "gpt-oss-120b",
    "qwen3-235b",
    "deepseek-v3",
    "deepseek-v3.2",
    "ds-27b",
)
UNITS = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@app.callback()
def plans() -> None:
    """Plans from a model, a device and a workload."""


@app.command("block-size")
def block_size(
    trace: Annotated[Path, typer.Argument(help="kvt-sessions-v1 or Mooncake JSONL")],
    model: Annotated[str, typer.Option(help=f"of {', '.join(MODELS)}")] = "deepseek-v3.2",
    bytes_per_token: Annotated[int | None, typer.Option(help="KV of all layers")] = None,
    device: Annotated[
        str,
        typer.Option(help="GB/s by file size, e.g. 256KiB=1.0,1MiB=1.6; or JSON of bench store"),
    ] = "64KiB=1.5,256KiB=4,1MiB=8,4MiB=12,16MiB=14",
    prefill_tokens_per_s: Annotated[
        float | None, typer.Option(help="for what was not restored")
    ] = None,
    sizes: Annotated[str, typer.Option(help="tokens a block; adaptive: by length")] = (
        "16,32,64,128,256,512,adaptive"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Hit rate lost against bandwidth gained, per block size, and the time a turn's prompt takes.

    `adaptive` is 64 tokens below 16k of context, 128 below 64k, else 256; a session that grows into
    the next size starts over, because blocks of another size have other keys.
    """
    from kvtransfer.analysis import ADAPTIVE, plan_block_size
    from kvtransfer.workload import read_trace

    if model not in MODELS:
        raise InvalidArgument(f"--model must be of {', '.join(MODELS)}, got {model!r}")
    try:
        candidates = [ADAPTIVE if s == "adaptive" else int(s) for s in sizes.split(",")]
    except ValueError as error:
        raise InvalidArgument(f"--sizes must be numbers or adaptive, got {sizes!r}") from error
    if any(
        size < 1
        for size, word in zip(candidates, sizes.split(","), strict=True)
        if word != "adaptive"
    ):
        raise InvalidArgument(f"--sizes must be positive, got {sizes!r}")
    per_token = bytes_per_token or MODELS[model][0]
    speed = prefill_tokens_per_s or MODELS[model][1]
    plans = plan_block_size(read_trace(trace), candidates, per_token, _curve(device), speed)
    if as_json:
        print(json.dumps([asdict(plan) for plan in plans]))
        return
    table = Table(
        *("tokens a block", "hit rate", "lost to 16", "blocks a turn", "KiB a block"),
        *("load s", "compute s", "turn s", ""),
        title=f"{trace.name}, {model}: {per_token} B a token, {speed:.0f} tokens/s",
    )
    best = min(plans, key=lambda plan: plan.turn_s)
    finest = max(plan.hit_rate for plan in plans)
    for plan in plans:
        table.add_row(
            str(plan.block_tokens) if plan.block_tokens != ADAPTIVE else "adaptive",
            f"{plan.hit_rate:.4f}",
            f"{finest - plan.hit_rate:.4f}",
            f"{plan.blocks_per_turn:.0f}",
            f"{plan.block_bytes / 1024:.0f}",
            *(f"{seconds:.3f}" for seconds in (plan.load_s, plan.compute_s, plan.turn_s)),
            "best" if plan is best else "",
        )
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)


@app.command("cluster")
def cluster(
    trace: Annotated[
        Path | None, typer.Argument(help="kvt-sessions-v1 or Mooncake JSONL; else the means below")
    ] = None,
    prefill: Annotated[int, typer.Option(help="prefill nodes")] = 2,
    decode: Annotated[int, typer.Option(help="decode nodes")] = 4,
    gpus: Annotated[int, typer.Option(help="GPUs, and compute NICs, per node")] = 8,
    cnic_gbps: Annotated[float, typer.Option(help="Gb/s of a compute NIC")] = 400,
    storage_gbps: Annotated[float, typer.Option(help="Gb/s of a node's storage NICs")] = 400,
    dram_gb_per_s: Annotated[float, typer.Option(help="GB/s of a node's memory")] = 500,
    model: Annotated[str, typer.Option(help=f"of {', '.join(MODEL_NAMES)}")] = "deepseek-v3.2",
    gpu_tflops: Annotated[float, typer.Option(help="that prefill really gets of a GPU")] = 400,
    context: Annotated[float, typer.Option(help="tokens of a turn's hit, without a trace")] = 32721,
    append: Annotated[float, typer.Option(help="tokens of a turn to compute")] = 429,
    block_tokens: Annotated[int, typer.Option(help="of the trace's hits")] = 64,
    plot: Annotated[Path | None, typer.Option(help="write the loads against P/D as PNG")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """The P/D ratios that only storage limits, what binds at this one, and what both paths gain.

    The formulas of the paper's section 4.2; decoding's own needs are not in them.
    """
    from kvtransfer.analysis import (
        MODEL_COSTS,
        ClusterShape,
        TurnMeans,
        loads,
        plan_cluster,
        ratio_range,
        turn_means,
    )
    from kvtransfer.workload import read_trace

    if model not in MODEL_COSTS:
        raise InvalidArgument(f"--model must be of {', '.join(MODEL_COSTS)}, got {model!r}")
    if block_tokens < 1:
        raise InvalidArgument(f"--block-tokens must be positive, got {block_tokens}")
    shape = ClusterShape(gpus, cnic_gbps * 1e9 / 8, storage_gbps * 1e9 / 8, dram_gb_per_s * 1e9)
    turn = (
        turn_means(read_trace(trace), block_tokens)
        if trace is not None
        else TurnMeans(context, append)
    )
    found = ratio_range(shape)
    plan = plan_cluster(shape, MODEL_COSTS[model], turn, prefill, decode, gpu_tflops * 1e12)
    shares = loads(shape, prefill, decode).shares(shape)
    if plot is not None:
        from kvtransfer.cli.plot_loads import plot_loads

        plot_loads(shape, prefill / decode, plot)
    if as_json:
        result = {"plan": asdict(plan), "gain": plan.gain, "turn": asdict(turn), "shares": shares}
        print(json.dumps({**result, "range": asdict(found), "feasible": found.feasible}))
        return
    table = Table("resource", "share of its bandwidth", title=f"{prefill}P{decode}D, full SNICs")
    for name, share in shares.items():
        table.add_row(name, f"{share:.3f}" + (" binds" if share > 1 else ""))
    console = Console()
    console.print(table)
    if found.feasible:
        here = "inside" if found.contains(prefill, decode) else "outside"
        console.print(
            f"P/D that only storage limits: {found.lower:.3f} ({found.lower_by}) to "
            f"{found.upper:.3f} ({found.upper_by}); {prefill / decode:.3f} is {here}"
        )
    else:
        console.print("no P/D ratio lets storage alone be the limit: it is too fast for the nodes")
    console.print(
        f"{MODEL_COSTS[model].name}, {turn.hit_tokens:.0f} tokens hit and {turn.miss_tokens:.0f} "
        f"computed a turn: {plan.single_path:.1f} turns/s over the PE path, {plan.both_paths:.1f} over "
        f"both, {plan.prefill_compute:.1f} by prefill compute; {plan.binding} binds, gain "
        f"{plan.gain:.2f}x"
    )


def _curve(text: str) -> DeviceCurve:
    from kvtransfer.analysis import DeviceCurve

    points: dict[int, float] = {}
    if text.endswith(".json"):
        try:
            rows = json.loads(Path(text).read_text())
            for row in rows:
                if row["mode"] == "read" and row["program"] == "kvtransfer":
                    speeds = sorted(sample["gb_per_s"] for sample in row["samples"])
                    points[_bytes(row["size"])] = speeds[len(speeds) // 2]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidArgument(f"--device {text}: no JSON of bench store: {error!r}") from error
    else:
        for point in text.split(","):
            size, _, speed = point.partition("=")
            try:
                points[_bytes(size)] = float(speed)
            except ValueError as error:
                raise InvalidArgument(
                    f"--device must read like 256KiB=1.0,1MiB=1.6, got {point!r}"
                ) from error
    ordered = sorted(points)
    return DeviceCurve(tuple(ordered), tuple(points[size] for size in ordered))


def _bytes(text: str) -> int:
    unit = text.strip()[-3:].upper()
    if unit not in UNITS:
        raise ValueError(f"{text!r} has no unit of KiB, MiB, GiB")
    return int(float(text.strip()[:-3]) * UNITS[unit])
