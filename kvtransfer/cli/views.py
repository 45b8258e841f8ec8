"""What the replay shows: a live table of turns, and the tables at its end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvtransfer.engine.reference import VerifyReport
from kvtransfer.engine.replay import ReplayRun, TurnRecord

__all__ = ["LiveView", "per_turn_table", "summary_table", "verify_lines"]

SHOWN_TURNS = 12


class LiveView:
    """On a terminal a table that updates in place; elsewhere one line a turn."""

    def __init__(self, console: Console, title: str, total_turns: int) -> None:
        self._console, self._title, self._total = console, title, total_turns
        self._records: list[TurnRecord] = []
        self._live = (
            Live(console=console, refresh_per_second=8, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
            self._live.update(f"{self._title}: starting engines ...")
        else:
            self._console.print(f"{self._title}: starting engines ...")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def add(self, record: TurnRecord) -> None:
        self._records.append(record)
        done = len(self._records)
        if self._live is not None:
            shown = turn_rows(f"{self._title}: turn {done}/{self._total}", self._records)
            self._live.update(shown)
        elif done % max(self._total // 10, 1) == 0 or done == self._total:
            self._console.print(
                f"{self._title}: {done}/{self._total} turns, last: {record.session_id} turn "
                f"{record.turn} via {record.read_path}, {record.hit_blocks} blocks hit, "
                f"first token after {record.ttft_s * 1e3:.0f} ms",
                soft_wrap=True,
            )


def turn_rows(title: str, records: Sequence[TurnRecord], most: int = SHOWN_TURNS) -> Table:
    table = Table(title=title, title_justify="left")
    for name in (
        "session",
        "turn",
        "path",
        "tokens",
        "hit",
        "read MB",
        "TTFT ms",
        "load ms",
        "stall ms",
        "stall/layer ms",
        "overlap",
        "decode ms",
        "engines",
    ):
        table.add_column(name, justify="left" if name in ("session", "engines") else "right")
    for r in records[-most:]:
        stall = sum(r.stall_s)
        table.add_row(
            r.session_id,
            f"{r.turn}",
            r.read_path,
            f"{len(r.prompt)}",
            f"{r.hit_blocks}",
            f"{r.loaded_bytes / 1e6:.2f}",
            f"{r.ttft_s * 1e3:.0f}",
            f"{r.load_s * 1e3:.0f}",
            f"{stall * 1e3:.0f}",
            f"{stall / max(len(r.stall_s), 1) * 1e3:.1f}",
            f"{r.overlap:.2f}" if r.load_s else "-",
            f"{r.decode_s * 1e3:.0f}",
            f"{r.prefill}>{r.decode}",
        )
    return table


def per_turn_table(run: ReplayRun) -> Table:
    return turn_rows(
        f"path {run.config.path}, every turn (hit in blocks of {run.config.block_tokens} tokens; "
        "overlap = 1 - stall/load)",
        sorted(run.records, key=lambda r: (r.session, r.turn)),
        len(run.records),
    )


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def summary_table(runs: Sequence[ReplayRun], recompute_s: float | None) -> Table:
    """One row a run; speed-up is wall time against the first."""
    table = Table(title="replay", title_justify="left")
    for name in (
        "path",
        "turns",
        "hit rate",
        "MB by PE",
        "MB by DE",
        "TTFT p50 ms",
        "load s",
        "stall s",
        "compute s",
        "hidden",
        "decode s",
        "wall s",
        "speed-up",
    ):
        table.add_column(name, justify="right")
    for run in runs:
        moved = run.bytes_by_path()
        table.add_row(
            run.config.path,
            f"{len(run.records)}",
            f"{run.hit_rate:.3f}",
            f"{moved['pe'] / 1e6:.1f}",
            f"{moved['de'] / 1e6:.1f}",
            f"{_median([r.ttft_s for r in run.records]) * 1e3:.0f}",
            f"{sum(r.load_s for r in run.records):.2f}",
            f"{sum(sum(r.stall_s) for r in run.records):.2f}",
            f"{sum(r.total_compute_s for r in run.records):.2f}",
            f"{run.hidden:.0%}",
            f"{sum(r.decode_s for r in run.records):.2f}",
            f"{run.wall_s:.2f}",
            f"{runs[0].wall_s / run.wall_s:.2f}x",
        )
    if recompute_s is not None:
        table.caption = (
            f"recomputing the last prompt without any cache takes {recompute_s * 1e3:.0f} ms on "
            "one core"
        )
        table.caption_justify = "left"
    return table


def verify_lines(run: ReplayRun, report: VerifyReport) -> list[str]:
    """The verdict of one run, a line a finding."""
    path = run.config.path
    lines = []
    if report.skipped:
        lines.append(f"verify {path}: same-splits check skipped: {report.skipped}")
    else:
        equal = report.rows_checked - len(report.rows_different)
        lines.append(
            f"verify {path}: {equal}/{report.rows_checked} logits rows bitwise equal to a run "
            f"without a store ({report.forwards} forwards)"
        )
    same = report.tokens_checked - len(report.differences)
    lines.append(
        f"verify {path}: {same}/{report.tokens_checked} tokens equal to a one-shot prefill; "
        f"{len(report.wrong_hits)} turns with another hit length than the trace implies"
    )
    for request, position in report.rows_different[:5]:
        lines.append(f"  request {request}: logits before position {position} differ")
    for d in report.differences[:5]:
        lines.append(
            f"  {d.session_id} turn {d.turn} position {d.position}: token {d.token}, one-shot "
            f"{d.one_shot_token}; gap of the two best logits {d.gap:.2e} (one-shot "
            f"{d.one_shot_gap:.2e})"
        )
    for session, turn, got, wanted in report.wrong_hits[:5]:
        lines.append(f"  {session} turn {turn}: hit {got} blocks, the trace implies {wanted}")
    for record in run.records:
        for failure in record.failures:
            lines.append(f"  {record.session_id} turn {record.turn}: recovered from: {failure}")
    return lines
