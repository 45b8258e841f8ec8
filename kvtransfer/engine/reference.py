"""Checks a replay against computation without any store.

Two references. *Same splits*: every forward of every engine again, with the same batch composition,
over KV that never left memory; logits must be bitwise equal. *One shot*: transformers' own model,
attention and mask over each whole sequence at once; the greedy tokens must be equal, or the position
is named with the gap between the two best logits there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvtransfer.engine.base import describe_logits
from kvtransfer.engine.replay import ReplayRun, TurnRecord
from kvtransfer.engine.sequences import ResidentSequence
from kvtransfer.keys import chain_keys
from kvtransfer.models import Model, SequenceSlice, load_model
from kvtransfer.models.runner import ATTENTION_NAME

__all__ = ["OneShotDifference", "VerifyReport", "verify_replay"]


@dataclass(frozen=True)
class OneShotDifference:
    """A generated token that a one-shot prefill would not have chosen; the gaps between the two
    best logits in the replay and in the one-shot run tell how close a call it was."""

    session_id: str
    turn: int
    position: int
    token: int
    one_shot_token: int
    gap: float
    one_shot_gap: float


@dataclass
class VerifyReport:
    forwards: int = 0
    rows_checked: int = 0
    rows_different: list[tuple[int, int]] = field(default_factory=list)  # (request, position)
    skipped: str = ""  # why the same-splits check could not run
    tokens_checked: int = 0
    differences: list[OneShotDifference] = field(default_factory=list)
    wrong_hits: list[tuple[str, int, int, int]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Bitwise equal, hits as the trace implies, and no token differs beyond a near-tie."""
        return not (self.rows_different or self.wrong_hits or self.real_differences)

    @property
    def real_differences(self) -> list[OneShotDifference]:
        """Differences that rounding can't explain: both runs were sure of their choice."""
        return [d for d in self.differences if min(d.gap, d.one_shot_gap) > NEAR_TIE]


NEAR_TIE = 1e-3  # of logits; float32 sums over other splits differ by about 1e-6 to 1e-5


def verify_replay(run: ReplayRun) -> VerifyReport:
    """Recomputes a run (which must have been made with ``journal=True``)."""
    torch.set_num_threads(1)  # as the engines: thread counts change summation orders
    report = VerifyReport()
    _check_hits(run, report)
    model = load_model(run.config.model, run.config.dtype)
    model.use_attention(ATTENTION_NAME)
    _check_same_splits(run, model, report)
    model.use_attention("sdpa")
    _check_one_shot(run, model, report)
    return report


def _check_hits(run: ReplayRun, report: VerifyReport) -> None:
    """Every block the finished requests left must have been hit. More is fine only where another
    session published the same block meanwhile; fewer only after a reported failure."""
    sessions = {r.session for r in run.records}
    for record in run.records:
        fewer = record.hit_blocks < record.expected_hit_blocks and not record.failures
        more = record.hit_blocks > record.expected_hit_blocks and len(sessions) == 1
        if fewer or more:
            report.wrong_hits.append(
                (record.session_id, record.turn, record.hit_blocks, record.expected_hit_blocks)
            )


# ---------------------------------------------------------------------------------- same splits


class _Reference:
    """Sequences and published blocks, in memory only."""

    def __init__(self, run: ReplayRun, model: Model) -> None:
        self.config = run.config
        self.model = model
        self.runner = self.model.runner()
        self.records = {r.request_id: r for r in run.records}
        self.blocks: dict[bytes, torch.Tensor] = {}
        self.length: dict[int, int] = {}
        self.sequences: dict[int, ResidentSequence] = {}
        self.keys: dict[int, list[bytes]] = {}

    def tokens(self, request_id: int) -> Any:
        record = self.records[request_id]
        return np.concatenate([record.prompt, record.generated])

    def open(self, request_id: int, hit_tokens: int) -> None:
        """(Re)starts a sequence with its hit prefix."""
        tokens = self.tokens(request_id)
        arena = self.model.arena(self.model.num_layers, len(tokens))
        span = arena.allocate(len(tokens))
        assert span is not None
        self.sequences[request_id] = ResidentSequence(arena, span)
        self.length[request_id] = hit_tokens
        keys = chain_keys(bytes(32), tokens, self.config.block_tokens)
        self.keys[request_id] = [key.tobytes() for key in keys]
        for index in range(hit_tokens // self.config.block_tokens):
            block = self.blocks[self.keys[request_id][index]]
            for layer in range(self.model.num_layers):
                first = index * self.config.block_tokens
                arena.write(layer, span, first, block[layer, 0], block[layer, 1])

    def advance(self, request_id: int, end: int) -> None:
        """Keeps the blocks this request published, as far as they are complete."""
        begin, block = self.length[request_id], self.config.block_tokens
        self.length[request_id] = end
        fresh = self.records[request_id].fresh_blocks
        sequence = self.sequences[request_id]
        for index in range(begin // block, end // block):
            if index < len(fresh) and fresh[index]:
                self.blocks[self.keys[request_id][index]] = _copy_block(
                    sequence, self.model.num_layers, index * block, block
                )
        if end == len(self.tokens(request_id)) - 1:
            del self.sequences[request_id]


def _copy_block(sequence: ResidentSequence, layers: int, first: int, count: int) -> torch.Tensor:
    out = []
    for layer in range(layers):
        keys, values = sequence.view(layer, first + count)
        out.append(torch.stack([keys[:, first:], values[:, first:]]))
    return torch.stack(out)


def _check_same_splits(run: ReplayRun, model: Model, report: VerifyReport) -> None:
    missing = [name for name in (*run.lost, *_engines(run)) if name not in run.journals]
    if missing:
        report.skipped = f"no journal of {', '.join(sorted(set(missing)))}"
        return
    reference = _Reference(run, model)
    events = sorted(
        (forward for journal in run.journals.values() for forward in journal.forwards),
        key=lambda forward: int(forward[0]),
    )
    for _, items in events:
        report.forwards += 1
        slices = []
        for request_id, first, count, _ in items:
            if reference.length.get(request_id) != first:
                reference.open(request_id, first)
            ids = reference.tokens(request_id)[first : first + count]
            slices.append(SequenceSlice(reference.sequences[request_id], first, ids))
        logits = reference.runner.forward(slices)
        for (request_id, first, count, digest), row in zip(items, logits, strict=True):
            report.rows_checked += 1
            if describe_logits(row, digest=True).digest != digest:
                report.rows_different.append((request_id, first + count))
            reference.advance(request_id, first + count)


def _engines(run: ReplayRun) -> list[str]:
    return [*run.config.prefill_engines, *run.config.decode_engines]


# ---------------------------------------------------------------------------------- one shot


def _check_one_shot(run: ReplayRun, model: Model, report: VerifyReport) -> None:
    for chain in _chains(run):
        last = chain[-1]
        ids = np.concatenate([last.prompt, last.generated]).astype(np.int64)
        positions = np.concatenate([np.arange(len(r.generated)) + len(r.prompt) - 1 for r in chain])
        with torch.inference_mode():
            output = model.module(
                input_ids=torch.from_numpy(ids).unsqueeze(0),
                logits_to_keep=torch.from_numpy(positions),
            )
        logits = output.logits[0].float()
        row = 0
        for record in chain:
            for i, token in enumerate(record.generated.tolist()):
                _compare(record, i, token, logits[row], report)
                row += 1


def _compare(
    record: TurnRecord, index: int, token: int, row: torch.Tensor, report: VerifyReport
) -> None:
    report.tokens_checked += 1
    best = int(row.argmax())
    if best != token:
        report.differences.append(
            OneShotDifference(
                record.session_id,
                record.turn,
                len(record.prompt) + index,
                token,
                best,
                record.logits[index].gap,
                describe_logits(row, digest=False).gap,
            )
        )


def _chains(run: ReplayRun) -> Iterator[list[TurnRecord]]:
    """Turns of a session that are prefixes of one another, so that one forward checks them all."""
    by_session: dict[int, list[TurnRecord]] = {}
    for record in run.records:
        by_session.setdefault(record.session, []).append(record)
    for records in by_session.values():
        chain: list[TurnRecord] = []
        for record in sorted(records, key=lambda r: r.turn):
            if chain and not _extends(record, chain[-1]):
                yield chain
                chain = []
            chain.append(record)
        if chain:
            yield chain


def _extends(record: TurnRecord, earlier: TurnRecord) -> bool:
    whole = np.concatenate([earlier.prompt, earlier.generated])
    head = record.prompt[: len(whole)]
    return len(head) == len(whole) and bool((head == whole).all())
