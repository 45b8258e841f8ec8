"""``kvtransfer replay``: serve sessions through real engines and show where the time went."""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import msgspec
import typer
from rich.console import Console

from kvtransfer.errors import InvalidArgument, Unsupported, WorkloadError
from kvtransfer.scheduler import Balance
from kvtransfer.workload import TABLE_2, Session, from_trace, generate, read_messages, read_trace

if TYPE_CHECKING:
    from kvtransfer.engine.config import ClusterConfig
    from kvtransfer.engine.replay import ReplayRun
    from kvtransfer.models import Model

__all__ = ["replay"]

DEMO_READ_CAP = 2.5e6  # bytes/s: small enough that loading dominates the tiny model
DEMO_TURNS = 8
DEMO_SCALE = 8
MEGA = 1e6


def replay(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[SESSIONS]...", help="traces (kvt-sessions-v1, Mooncake) or message lists"
        ),
    ] = None,
    prefill: Annotated[int, typer.Option(help="prefill engines")] = 1,
    decode: Annotated[int, typer.Option(help="decode engines")] = 1,
    path: Annotated[
        str | None, typer.Option(help="pe, de, auto or split; several: pe,split")
    ] = None,
    balance: Annotated[
        str,
        typer.Option(
            help="who gets a request: paper, aware, round_robin, least_tokens or affinity"
        ),
    ] = "paper",
    model: Annotated[str, typer.Option(help="tiny, smollm2 or a local directory")] = "tiny",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    store: Annotated[
        Path | None, typer.Option(help="store directory (default: a temporary one)")
    ] = None,
    store_max_mb: Annotated[float, typer.Option(help="byte cap of the store, MB; 0: none")] = 0,
    transport: Annotated[str, typer.Option(help="shm or verbs")] = "shm",
    verbs_devices: Annotated[
        str,
        typer.Option(help="comma-separated, handed to the engines in turn; default: all active"),
    ] = "",
    verbs_queue_pairs: Annotated[int, typer.Option(help="per peer and traffic class")] = 1,
    copy: Annotated[
        str, typer.Option(help="how layers are staged: cpu, or nic (loopback queue pair)")
    ] = "cpu",
    block_tokens: int = 64,
    turns: Annotated[int | None, typer.Option(help="at most so many turns a session")] = None,
    sessions: Annotated[
        int | None, typer.Option(help="at most so many sessions, all at once")
    ] = None,
    scale: Annotated[int | None, typer.Option(help="divide every length of the input")] = None,
    seed: int = 0,
    storage_mbps: Annotated[
        float | None, typer.Option(help="cap of each engine's storage reads, MB/s; 0: none")
    ] = None,
    network_mbps: Annotated[
        float, typer.Option(help="cap of each engine's link, MB/s; 0: none")
    ] = 0,
    pool_blocks: Annotated[int | None, typer.Option(help="slots of each PE and DE buffer")] = None,
    memory_blocks: Annotated[
        int, typer.Option(help="blocks each engine keeps in memory before the store; 0: none")
    ] = 0,
    read_parts: Annotated[
        int, typer.Option(help="storage reads per block; 0: one a layer, 1: Full Blocks")
    ] = 0,
    layerwise: Annotated[
        bool, typer.Option(help="start a forward when its first layer is there")
    ] = True,
    quota_ms: Annotated[float, typer.Option(help="compute quota of a prefill batch")] = 300,
    profile: Annotated[Path | None, typer.Option(help="JSON of `kvtransfer profile`")] = None,
    deadline_s: float = 120,
    verify: Annotated[
        bool, typer.Option(help="recompute everything without a store and compare")
    ] = False,
    table: Annotated[bool, typer.Option(help="print every turn, too")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write all records here")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="write a Chrome/Perfetto trace of the last run")
    ] = None,
) -> None:
    """Replay agent sessions through prefill and decode engines in processes of their own.

    Without input: two generated sessions, once over the PE path alone and once over both, under
    equal storage caps. Exit code 0: every turn was served (and verified); 1: not; 2: bad input.
    """
    demo = not files
    paths = (path or ("pe,auto" if demo else "auto")).split(",")
    for name in paths:
        if name not in ("pe", "de", "auto", "split"):
            raise InvalidArgument(f"--path must be pe, de, auto or split, got {name!r}")
    for option, value, known in (
        ("balance", balance, get_args(Balance)),
        ("transport", transport, ("shm", "verbs")),
        ("copy", copy, ("cpu", "nic")),
    ):
        if value not in known:
            raise InvalidArgument(f"--{option} must be of {', '.join(known)}, got {value!r}")
    _check_positive(
        turns=turns,
        sessions=sessions,
        scale=scale,
        pool_blocks=pool_blocks,
        block_tokens=block_tokens,
        verbs_queue_pairs=verbs_queue_pairs,
    )
    _check_not_negative(
        storage_mbps=storage_mbps, network_mbps=network_mbps, store_max_mb=store_max_mb
    )
    if storage_mbps is None:
        storage_mbps = DEMO_READ_CAP / MEGA if demo else 0
    options: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "block_tokens": block_tokens,
        "store_max_bytes": int(store_max_mb * MEGA),
        "num_prefill": prefill,
        "num_decode": decode,
        "balance": balance,
        "transport": transport,
        "copy": copy,
        "verbs_devices": _devices(verbs_devices) if transport == "verbs" else [],
        "verbs_queue_pairs": verbs_queue_pairs,
        "storage_read_cap": int(storage_mbps * MEGA),
        "network_cap": int(network_mbps * MEGA),
        "memory_blocks": memory_blocks,
        "read_parts": read_parts,
        "layerwise": layerwise,
        "quota_s": quota_ms / 1000,
        "deadline_s": deadline_s,
        "trace": trace is not None,
        "journal": verify,
        **_read_profile(profile),
    }
    _check_early(options, files or [])
    console = Console()

    from kvtransfer.engine.process import prepare_processes

    prepare_processes()
    from kvtransfer.models import load_model, namespace_of

    loaded = load_model(model, dtype)
    work = _read_work(files or [], loaded, turns, sessions, scale, seed)
    options |= _sizes(work, block_tokens, pool_blocks)
    options["namespace"] = namespace_of(loaded, block_tokens).digest().hex()
    options["layer_planes"] = loaded.layer_planes
    runs = _run_paths(console, options, paths, store, work)
    _show(console, runs, table, loaded)
    failed = verify and not _verify(console, runs)
    if trace is not None:
        from kvtransfer.engine.timeline import write_trace

        write_trace(runs[-1], trace)
        console.print(f"trace: {trace} (open it at ui.perfetto.dev, or `kvtransfer plot {trace}`)")
    if json_file is not None:
        json_file.write_text(json.dumps([_to_json(run) for run in runs]))
    if failed:
        raise typer.Exit(1)


def _devices(wanted: str) -> list[str]:
    """Active devices, or those asked for."""
    from kvtransfer.transport import verbs_devices

    ports, why = verbs_devices()
    active = list(dict.fromkeys(p["device"] for p in ports if p["state"] == "active"))
    if not active:
        raise Unsupported(f"--transport verbs: {why or 'no device has an active port'}")
    names = wanted.split(",") if wanted else active
    for name in names:
        if name not in active:
            raise InvalidArgument(f"--verbs-devices: {name!r} is not one of {', '.join(active)}")
    return names


def _check_positive(**options: int | None) -> None:
    for name, value in options.items():
        if value is not None and value < 1:
            raise InvalidArgument(f"--{name.replace('_', '-')} must be positive, got {value}")


def _check_not_negative(**options: float | None) -> None:
    for name, value in options.items():
        if value is not None and not value >= 0:
            raise InvalidArgument(f"--{name.replace('_', '-')} must not be negative, got {value}")


def _check_early(options: dict[str, Any], files: list[Path]) -> None:
    """What can be refused before a model is loaded."""
    from kvtransfer.engine.config import ClusterConfig

    known = {**options, "namespace": "00" * 32, "layer_planes": [[1]]}
    _make_config(ClusterConfig, known, "check", "auto", Path())
    for file in files:
        if not file.is_file():
            raise WorkloadError(f"{file}: No such file")


def _read_work(
    files: list[Path],
    model: Model,
    turns: int | None,
    sessions: int | None,
    scale: int | None,
    seed: int,
) -> list[Session]:
    if not files:
        return generate(
            TABLE_2["32k"],
            sessions or 2,
            model.vocab_size,
            seed=seed,
            scale=scale or DEMO_SCALE,
            max_turns=turns or DEMO_TURNS,
        )
    work: list[Session] = []
    for file in files:
        if _is_messages(file):
            if scale not in (None, 1):
                raise InvalidArgument("--scale is for traces; real text has its length")
            work += read_messages(file, _encoder(model), max_turns=turns)
        else:
            for trace in read_trace(file):
                if sessions is not None and len(work) >= sessions:
                    break
                work.append(from_trace(trace, model.vocab_size, scale=scale or 1, max_turns=turns))
    work = [s for s in work if s.turns][:sessions]
    if not work:
        raise WorkloadError(f"{', '.join(map(str, files))}: no sessions with turns")
    return work


def _is_messages(file: Path) -> bool:
    return file.name.endswith((".json", ".json.gz"))


def _encoder(model: Model) -> Any:
    from kvtransfer.workload.messages import byte_tokens

    tokenizer = model.tokenizer()
    if tokenizer is None:
        return byte_tokens
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def _sizes(work: list[Session], block_tokens: int, pool_blocks: int | None) -> dict[str, int]:
    """Memory for all sessions at once, each at its longest."""
    longest = []
    for session in work:
        length = most = 0
        for turn in session.turns:
            length = (length if turn.keep is None else turn.keep) + len(turn.append) + turn.generate
            most = max(most, length)
        longest.append(most + 64)
    tokens = sum(longest)
    blocks = sum(-(-n // block_tokens) + 1 for n in longest)
    return {
        "pool_blocks": pool_blocks or blocks + 8,
        "prefill_tokens": max(longest) + max(min(tokens - max(longest), 8192), 0),
        # Twice: a sequence needs one run of pages, and runs of different lengths come and go.
        "decode_tokens": 2 * tokens,
    }


def _read_profile(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        data = json.loads(file.read_text())
        keys = ("time_fixed_s", "time_per_token_s", "time_per_pair_s", "beta")
        return {key: data[key] for key in keys}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{file}: not a profile: {error}") from error


def _run_paths(
    console: Console,
    options: dict[str, Any],
    paths: list[str],
    store: Path | None,
    work: list[Session],
) -> list[ReplayRun]:
    """One cluster per path, each with a store of its own below ``store`` if there are several."""
    from kvtransfer.cli.views import LiveView
    from kvtransfer.engine.cluster import new_cluster_name
    from kvtransfer.engine.config import ClusterConfig
    from kvtransfer.engine.replay import run_replay

    total = sum(len(s.turns) for s in work)
    runs = []
    with ExitStack() as stack:
        if store is None:
            store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtransfer-")))
        for path in paths:
            folder = store / path if len(paths) > 1 else store
            config = _make_config(ClusterConfig, options, new_cluster_name(), path, folder)
            title = f"path {path} ({config.num_prefill}P{config.num_decode}D)"
            with LiveView(console, title, total) as view:
                runs.append(run_replay(config, work, view.add))
    return runs


def _make_config(
    kind: type[ClusterConfig], options: dict[str, Any], name: str, path: str, store: Path
) -> ClusterConfig:
    try:
        return msgspec.convert({**options, "name": name, "path": path, "store": str(store)}, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(str(error)) from error


def _show(console: Console, runs: list[ReplayRun], table: bool, model: Model) -> None:
    from kvtransfer.cli.views import per_turn_table, summary_table

    wide = Console(width=max(console.width, 140)) if not console.is_terminal else console
    if table:
        for run in runs:
            wide.print(per_turn_table(run))
    wide.print(summary_table(runs, _recompute_seconds(runs[-1], model)))
    for run in runs:
        for engine, reason in run.lost.items():
            console.print(f"path {run.config.path}: {engine} was lost: {reason}")


def _recompute_seconds(run: ReplayRun, model: Model) -> float:
    """Prefill of the longest prompt without any cache, on one thread, as an engine would."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    prompt = max((r.prompt for r in run.records), key=len).astype(np.int64)
    model.use_attention("sdpa")
    ids = torch.from_numpy(prompt).unsqueeze(0)
    with torch.inference_mode():
        begin = time.perf_counter()
        model.module(input_ids=ids, logits_to_keep=1)
        return time.perf_counter() - begin


def _verify(console: Console, runs: list[ReplayRun]) -> bool:
    from kvtransfer.cli.views import verify_lines
    from kvtransfer.engine.reference import verify_replay

    fine = True
    for run in runs:
        report = verify_replay(run)
        fine &= report.ok
        for line in verify_lines(run, report):
            console.print(line, soft_wrap=True, highlight=False)
    console.print("verified" if fine else "VERIFICATION FAILED")
    return fine


def _to_json(run: ReplayRun) -> dict[str, Any]:
    records = []
    for record in run.records:
        row = asdict(record)
        row["prompt"] = len(record.prompt)
        row["generated"] = record.generated.tolist()
        row["logits"] = [item.gap for item in record.logits]
        row["overlap"] = record.overlap
        row["loaded_bytes"] = record.loaded_bytes
        records.append(row)
    return {
        "config": msgspec.to_builtins(run.config),
        "wall_s": run.wall_s,
        "hidden": run.hidden,
        "hit_rate": run.hit_rate,
        "bytes_by_path": run.bytes_by_path(),
        "counters": {name: journal.counters for name, journal in run.journals.items()},
        "lost": run.lost,
        "records": records,
    }
