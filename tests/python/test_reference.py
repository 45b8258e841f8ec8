"""The verifier itself: it must pass a right run and catch every kind of wrong one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from records import make_config, make_record

from kvtransfer.engine.base import describe_logits
from kvtransfer.engine.messages import Journal
from kvtransfer.engine.reference import _chains, verify_replay
from kvtransfer.engine.replay import ReplayRun, TurnRecord
from kvtransfer.engine.sequences import ResidentSequence
from kvtransfer.models import SequenceSlice, load_model, namespace_of

torch.set_num_threads(1)
BLOCK = 64


def serve() -> ReplayRun:
    """Two turns of one session, computed as the engines would with a perfect store: the second
    turn's hit prefix is the first turn's KV."""
    model = load_model("tiny")
    runner = model.runner()
    arena = model.arena(model.num_layers, 512)
    span = arena.allocate(512)
    assert span is not None
    sequence = ResidentSequence(arena, span)
    prefills: list[object] = []
    decodes: list[object] = []
    records = []
    so_far = np.empty(0, np.uint32)
    clock = 0
    for turn, (append, generate) in enumerate([(150, 4), (60, 3)]):
        ids = np.random.default_rng(turn).integers(0, 1024, append).astype(np.uint32)
        prompt = np.concatenate([so_far, ids]).astype(np.uint32)
        hit = (len(so_far) - 1) // BLOCK if turn else 0
        first, infos, out = hit * BLOCK, [], []
        request = turn + 1
        tokens = prompt
        while len(out) < generate:
            piece = SequenceSlice(sequence, first, tokens[first:])
            (row,) = runner.forward([piece])
            info = describe_logits(row, digest=True)
            clock += 1
            target = prefills if not out else decodes
            target.append((clock, [(request, first, len(tokens) - first, info.digest)]))
            infos.append(info)
            out.append(int(row.argmax()))
            first = len(tokens)
            tokens = np.append(tokens, np.uint32(out[-1]))
        full = (len(tokens) - 1) // BLOCK
        records.append(
            make_record(
                turn=turn,
                request_id=request,
                prompt=prompt,
                generated=np.array(out, np.uint32),
                hit_blocks=hit,
                expected_hit_blocks=hit,
                fresh_blocks=tuple(i >= hit for i in range(full)),
                logits=tuple(infos),
            )
        )
        so_far = tokens
    config = make_config(
        namespace=namespace_of(model, BLOCK).digest().hex(), layer_planes=model.layer_planes
    )
    journals = {
        "pe0": Journal(engine="pe0", forwards=prefills),
        "de0": Journal(engine="de0", forwards=decodes),
    }
    return ReplayRun(config, records, journals)


@pytest.fixture(scope="module")
def right() -> ReplayRun:
    return serve()


def test_a_right_run_passes_bitwise_and_token_by_token(right: ReplayRun) -> None:
    report = verify_replay(right)
    assert report.ok
    assert report.rows_checked == 7
    assert report.tokens_checked == 7
    assert report.rows_different == []
    assert report.differences == []


def change(run: ReplayRun, index: int, **fields: object) -> ReplayRun:
    records: list[TurnRecord] = list(run.records)
    records[index] = replace(records[index], **fields)  # type: ignore[arg-type]
    return replace(run, records=records)


def test_a_changed_logits_digest_is_found(right: ReplayRun) -> None:
    when, items = right.journals["de0"].forwards[1]
    request, first, count, _ = items[0]
    forwards = list(right.journals["de0"].forwards)
    forwards[1] = (when, [(request, first, count, "0" * 16)])
    journals = {**right.journals, "de0": Journal(engine="de0", forwards=forwards)}
    report = verify_replay(replace(right, journals=journals))
    assert report.rows_different == [(request, first + count)]
    assert not report.ok


def test_a_changed_token_is_found_by_both_references(right: ReplayRun) -> None:
    generated = right.records[0].generated.copy()
    generated[1] ^= 1
    report = verify_replay(change(right, 0, generated=generated))
    assert not report.ok
    assert any(d.position == len(right.records[0].prompt) + 1 for d in report.differences)
    assert report.rows_different, "what follows a wrong token has other logits"


def test_kv_of_other_tokens_in_the_hit_prefix_is_found(right: ReplayRun) -> None:
    """As if the store had returned another session's block: the prompt says one thing, the logits
    came from another."""
    prompt = right.records[1].prompt.copy()
    prompt[10] ^= 1
    run = change(right, 1, prompt=prompt)
    with pytest.raises(KeyError):
        verify_replay(run)  # no published block has this key at all


@pytest.mark.parametrize("got", [0, 1])
def test_fewer_hits_than_the_trace_implies_are_found(right: ReplayRun, got: int) -> None:
    run = change(right, 1, expected_hit_blocks=right.records[1].hit_blocks + 1 + got)
    report = verify_replay(run)
    assert [w[1] for w in report.wrong_hits] == [1]
    assert not report.ok


def test_fewer_hits_after_a_reported_failure_are_in_order(right: ReplayRun) -> None:
    run = change(
        right, 1, expected_hit_blocks=right.records[1].hit_blocks + 1, failures=("block 2: rot",)
    )
    assert verify_replay(run).wrong_hits == []


def test_a_missing_journal_skips_the_bitwise_check_with_its_reason(right: ReplayRun) -> None:
    run = replace(right, journals={"de0": right.journals["de0"]}, lost={"pe0": "signal 9"})
    report = verify_replay(run)
    assert "pe0" in report.skipped
    assert report.rows_checked == 0
    assert report.tokens_checked == 7, "the one-shot check needs no journal"


def test_turns_that_extend_one_another_are_checked_in_one_forward(right: ReplayRun) -> None:
    assert [[r.turn for r in chain] for chain in _chains(right)] == [[0, 1]]
    branched = change(right, 1, prompt=np.arange(80, dtype=np.uint32))
    assert [[r.turn for r in chain] for chain in _chains(branched)] == [[0], [1]]
