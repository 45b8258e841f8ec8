"""The report of ``kvtransfer simulate``: one HTML file, figures inside."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtransfer.errors import ModelError

if TYPE_CHECKING:
    from kvtransfer.sim import SimResult
    from kvtransfer.sim.results import Stage

__all__ = ["write_report"]

STYLE = """body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 70em; color: #222 }
table { border-collapse: collapse } td, th { padding: .25em .8em; text-align: right }
th { border-bottom: 1px solid #888 } td:first-child, th:first-child { text-align: left }
img { max-width: 100%; margin: .5em 0 1.5em }"""
SHOWN_NODES = 12


def write_report(target: Path, labels: Sequence[str], results: Sequence[SimResult]) -> None:
    """Raises ModelError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ModelError(
            f"--html needs matplotlib: pip install 'kvtransfer[plot]' ({error})"
        ) from error
    figures = [("Job completion and latency", _bars(plt, labels, results))]
    if len({result.config["agents"]["rate"] for result in results}) > 1:
        figures.append(("Latency over the arrival rate", _rates(plt, labels, results)))
    figures.append((f"Storage NICs over time: {labels[-1]}", _nics(plt, results[-1])))
    stage = _typical(results[-1].stages)
    if stage is not None:
        figures.append((f"One turn: {labels[-1]}", _gantt(plt, stage)))
    body = [f"<h2>{html.escape(title)}</h2><img alt='' src='{image}'>" for title, image in figures]
    target.write_text(
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>kvtransfer simulate</title>"
        f"<style>{STYLE}</style><h1>kvtransfer simulate</h1>{_table(labels, results)}"
        + "".join(body)
        + f"<h2>Configuration</h2><pre>{html.escape(str(results[0].config))}</pre></html>"
    )


def _table(labels: Sequence[str], results: Sequence[SimResult]) -> str:
    head = "run,nodes,turns,JCT s,TTFT s mean,p90,p99,TPOT ms,load s,SNIC max/avg"
    rows = "".join(f"<th>{name}</th>" for name in head.split(","))
    for label, r in zip(labels, results, strict=True):
        cells = [
            html.escape(label),
            f"{r.config['prefill']}P{r.config['decode']}D",
            f"{r.turns}",
            f"{r.jct_s:.0f}",
            f"{r.ttft_s.mean:.2f}",
            f"{r.ttft_s.p90:.2f}",
            f"{r.ttft_s.p99:.2f}",
            f"{r.tpot_s.mean * 1e3:.1f}",
            f"{r.load_s.mean:.2f}",
            f"{r.snic_balance:.2f}",
        ]
        rows += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    return f"<table><tr>{rows}</table>"


def _image(plt: Any, figure: Any) -> str:
    out = io.BytesIO()
    figure.tight_layout()
    figure.savefig(out, format="png", dpi=100)
    plt.close(figure)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _bars(plt: Any, labels: Sequence[str], results: Sequence[SimResult]) -> str:
    figure, axes = plt.subplots(1, 4, figsize=(14, 1.4 + 0.42 * len(labels)), sharey=True)
    panels = (
        ("JCT, s", [r.jct_s for r in results], "{:.0f}"),
        ("TTFT mean, s", [r.ttft_s.mean for r in results], "{:.2f}"),
        ("TPOT mean, ms", [r.tpot_s.mean * 1e3 for r in results], "{:.1f}"),
        ("SNIC max/avg", [r.snic_balance for r in results], "{:.2f}"),
    )
    for axis, (title, values, form), color in zip(
        axes, panels, ("#4477aa", "#ee6677", "#228833", "#ccbb44"), strict=True
    ):
        bars = axis.barh(range(len(values)), values, color=color)
        axis.bar_label(bars, [form.format(v) for v in values], padding=3, fontsize=9)
        axis.set_title(title, fontsize=11)
        axis.margins(x=0.25)
        axis.set_yticks(range(len(labels)), labels)
    axes[0].invert_yaxis()
    return _image(plt, figure)


def _rates(plt: Any, labels: Sequence[str], results: Sequence[SimResult]) -> str:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4))
    for mode in dict.fromkeys(r.config["mode"] for r in results):
        rows = sorted(
            (r.config["agents"]["rate"], r.ttft_s.mean, r.tpot_s.mean * 1e3)
            for r in results
            if r.config["mode"] == mode
        )
        rates, ttft, tpot = zip(*rows, strict=True)
        axes[0].plot(rates, ttft, "o-", label=mode)
        axes[1].plot(rates, tpot, "o-", label=mode)
    for axis, title, limit in ((axes[0], "TTFT mean, s", 4), (axes[1], "TPOT mean, ms", 50)):
        axis.axhline(limit, color="#999999", linestyle="--", linewidth=1)
        axis.set_xlabel("agents per second")
        axis.set_title(title, fontsize=11)
        axis.grid(alpha=0.3)
        axis.legend()
    return _image(plt, figure)


def _nics(plt: Any, result: SimResult) -> str:
    figure, axes = plt.subplots(figsize=(12, 4))
    for name, rates in list(result.snic_rates.items())[:SHOWN_NODES]:
        style = "-" if name.startswith("pe") else "--"
        gigabytes = [rate / 1e9 for rate in rates]
        axes.step(result.windows_s, gigabytes, style, where="pre", label=name, linewidth=1.3)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GB/s read from storage")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(ncol=4, fontsize=9)
    return _image(plt, figure)


def _typical(stages: Sequence[Stage]) -> Stage | None:
    """The turn with the median time to its first token, of those that loaded something."""
    loaded = sorted((s for s in stages if s.hit), key=lambda s: s.first_token - s.submitted)
    return loaded[len(loaded) // 2] if loaded else None


def _gantt(plt: Any, stage: Stage) -> str:
    parts = (
        ("waits for engines", stage.submitted, stage.assigned, "#cccccc"),
        ("loads its prefix", stage.assigned, stage.loaded, "#4477aa"),
        ("waits for the GPU", stage.loaded, stage.prefill_begin, "#cccccc"),
        ("prefill, layer by layer", stage.prefill_begin, stage.first_token, "#333333"),
        ("to the decode GPU", stage.first_token, stage.landed, "#ee6677"),
        ("decodes", stage.landed, stage.done, "#228833"),
    )
    figure, axes = plt.subplots(figsize=(12, 3.2))
    for row, (_, begin, end, color) in enumerate(parts):
        shown = (begin - stage.submitted) * 1e3, (end - begin) * 1e3
        axes.barh(row, shown[1], left=shown[0], color=color)
        axes.text(sum(shown), row, f" {shown[1]:.1f}", va="center", fontsize=9)
    axes.set_yticks(range(len(parts)), [name for name, *_ in parts])
    axes.invert_yaxis()
    axes.set_xlabel("ms since the turn was submitted")
    axes.set_title(
        f"agent {stage.agent}, turn {stage.index}: {stage.hit} tokens hit, {stage.decode_tokens} of "
        f"them by the DE, on {stage.prefill} and {stage.decode}",
        fontsize=10,
    )
    axes.margins(x=0.08)
    return _image(plt, figure)
