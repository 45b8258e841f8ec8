"""Workloads by property: what is written is read back, statistics against brute force, sizes kept."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import InvalidArgument
from kvtransfer.workload import (
    TABLE_2,
    AgenticSpec,
    TraceSession,
    TraceTurn,
    describe,
    from_trace,
    generate,
    read_trace,
)
from kvtransfer.workload.generator import trajectories
from kvtransfer.workload.sessions import Turn, derive_tokens
from kvtransfer.workload.statistics import WorkloadStats

BLOCK = 64


@st.composite
def sessions(draw: st.DrawFn) -> TraceSession:
    """A session whose turns keep a prefix of an earlier prompt and append fresh blocks."""
    turns: list[TraceTurn] = []
    fresh = 0
    for _ in range(draw(st.integers(1, 6))):
        base = turns[draw(st.integers(0, len(turns) - 1))].block_ids if turns else np.empty(0, int)
        kept = base[: draw(st.integers(0, len(base)))]
        count = draw(st.integers(0, 5))
        ids = np.concatenate([kept, np.arange(fresh, fresh + count)]).astype(np.int64)
        fresh += count
        tail = draw(st.integers(0 if len(ids) else 1, BLOCK - 1))
        turns.append(TraceTurn(ids, len(ids) * BLOCK + tail, draw(st.integers(0, 300))))
    return TraceSession("s", BLOCK, tuple(turns))


def encode(session: TraceSession) -> dict[str, object]:
    """The kvt-sessions-v1 form: each prompt relative to the one before, runs as [first, count]."""
    out: list[dict[str, object]] = []
    before: list[int] = []
    for turn in session.turns:
        ids = turn.block_ids.tolist()
        kept = 0
        while kept < min(len(ids), len(before)) and ids[kept] == before[kept]:
            kept += 1
        runs: list[list[int]] = []
        for block in ids[kept:]:
            if runs and sum(runs[-1]) == block:
                runs[-1][1] += 1
            else:
                runs.append([block, 1])
        out.append({"in": turn.input_tokens, "out": turn.output_tokens, "k": kept, "h": runs})
        before = ids
    return {"id": session.session_id, "turns": out}


@given(st.lists(sessions(), min_size=1, max_size=3), st.booleans())
def test_a_written_trace_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, made: list[TraceSession], zipped: bool
) -> None:
    lines = [{"schema": "kvt-sessions-v1", "block_size": BLOCK}, *map(encode, made)]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    path.write_bytes(gzip.compress(data) if zipped else data)
    got = list(read_trace(path))
    assert len(got) == len(made)
    for a, b in zip(got, made, strict=True):
        for x, y in zip(a.turns, b.turns, strict=True):
            assert x.block_ids.tolist() == y.block_ids.tolist()
            assert (x.input_tokens, x.output_tokens) == (y.input_tokens, y.output_tokens)


def brute_force(made: list[TraceSession]) -> WorkloadStats:
    requests = [(s, t) for s in made for t in s.turns]
    hits = 0
    for session in made:
        seen: set[int] = set()
        for turn in session.turns:
            for block in turn.block_ids.tolist():
                if block not in seen:
                    break
                hits += BLOCK
            seen |= set(turn.block_ids.tolist())
    inputs = sum(t.input_tokens for _, t in requests)
    outputs = sum(t.output_tokens for _, t in requests)
    lasts = [s.turns[-1] for s in made]
    return WorkloadStats(
        sessions=len(made),
        requests=len(requests),
        turns_per_session=len(requests) / len(made),
        append_tokens=(inputs - hits) / len(requests),
        generated_tokens=outputs / len(requests),
        total_tokens=sum(t.input_tokens + t.output_tokens for t in lasts) / len(made),
        context_tokens=inputs / len(requests),
        max_context_tokens=max(t.input_tokens for _, t in requests),
        hit_rate=hits / inputs,
    )


@given(st.lists(sessions(), min_size=1, max_size=4))
def test_statistics_equal_a_brute_force_count(made: list[TraceSession]) -> None:
    got, wanted = describe(made), brute_force(made)
    for field in WorkloadStats.__dataclass_fields__:
        assert getattr(got, field) == pytest.approx(getattr(wanted, field)), field


def test_statistics_of_nothing_are_zero() -> None:
    assert describe([]).requests == 0
    assert describe([]).hit_rate == 0


@given(sessions(), st.sampled_from([1, 2, 16, 64]))
def test_prompts_share_exactly_the_tokens_of_their_common_blocks(
    session: TraceSession, scale: int
) -> None:
    per_block = BLOCK // scale
    replayed = from_trace(session, 10**6, scale=scale)
    so_far = np.empty(0, np.uint32)
    prompts = []
    for turn in replayed.turns:
        prompts.append(turn.prompt(so_far))
        so_far = np.concatenate([prompts[-1], np.full(turn.generate, 1, np.uint32)])
    for i, a in enumerate(session.turns):
        assert len(prompts[i]) >= len(a.block_ids) * per_block
        for j, b in enumerate(session.turns[:i]):
            pairs = zip(a.block_ids.tolist(), b.block_ids.tolist(), strict=False)
            common = 0
            for x, y in pairs:
                if x != y:
                    break
                common += 1
            tokens = common * per_block
            assert prompts[i][:tokens].tolist() == prompts[j][:tokens].tolist()


@given(st.integers(0, 2**40), st.integers(1, 64), st.integers(2, 50_000))
def test_derived_tokens_stay_in_the_vocabulary(block: int, count: int, vocab: int) -> None:
    tokens = derive_tokens("scope", [block, block + 1], count, vocab)
    assert tokens.dtype == np.uint32
    assert len(tokens) == 2 * count
    assert int(tokens.max()) < vocab


def test_derived_tokens_look_random() -> None:
    tokens = derive_tokens("scope", np.arange(500), 64, 1024)
    counts = np.bincount(tokens, minlength=1024)
    assert counts.min() > 5, "every token of the vocabulary comes up"
    assert counts.max() < 80, "31 on average"
    assert len({tokens[i : i + 64].tobytes() for i in range(0, len(tokens), 64)}) == 500


@pytest.mark.parametrize("name", TABLE_2)
def test_trajectories_never_pass_their_maximum_and_grow_from_a_first_prompt(name: str) -> None:
    spec = TABLE_2[name]
    for made in trajectories(spec, 100, 9):
        context = made.context
        assert (np.diff(context) > 0).all()
        assert made.total <= spec.max_length * 1.01
        assert len(made.append) == len(made.generated) >= 2
        assert made.append.min() >= 1
        assert made.generated.min() >= 1
        assert context[-1] + made.generated[-1] == made.total


def test_longer_trajectories_have_smaller_turns() -> None:
    """The table's trap: turn counts and sizes are anti-correlated."""
    made = trajectories(TABLE_2["64k"], 300, 0)
    turns = np.array([len(t.append) for t in made])
    sizes = np.array([t.append.mean() for t in made])
    assert np.corrcoef(np.log(turns), np.log(sizes))[0, 1] < -0.8


def test_a_spec_of_ones_own_is_met_as_well() -> None:
    spec = AgenticSpec(10_000, turns=20, append=400, generated=100, total=7_000, context=4_500)
    made = trajectories(spec, 400, 1)
    assert np.mean([len(t.append) for t in made]) == pytest.approx(20, rel=0.05)
    assert np.mean([t.append.mean() for t in made]) == pytest.approx(400, rel=0.08)
    assert np.mean([t.total for t in made]) == pytest.approx(7_000, rel=0.05)


def test_generated_sessions_scale_and_cut() -> None:
    whole = generate(TABLE_2["32k"], 1, 1024, seed=5)[0]
    small = generate(TABLE_2["32k"], 1, 1024, seed=5, scale=8, max_turns=3)[0]
    assert len(small.turns) == 3
    for a, b in zip(small.turns, whole.turns, strict=False):
        assert len(a.append) == max(len(b.append) // 8, 1)
        assert a.generate == max(b.generate // 8, 1)
    with pytest.raises(InvalidArgument, match="scale"):
        generate(TABLE_2["32k"], 1, 1024, scale=0)
    with pytest.raises(InvalidArgument, match="count"):
        trajectories(TABLE_2["32k"], 0, 0)


@given(st.integers(0, 30), st.integers(0, 30), st.one_of(st.none(), st.integers(0, 40)))
def test_a_turn_s_prompt_is_what_it_keeps_and_what_it_appends(
    so_far: int, append: int, keep: int | None
) -> None:
    history = np.arange(so_far, dtype=np.uint32)
    more = np.arange(100, 100 + append, dtype=np.uint32)
    prompt = Turn(more, 1, keep).prompt(history)
    kept = so_far if keep is None else min(keep, so_far)
    assert prompt.tolist() == [*range(kept), *range(100, 100 + append)]
    assert prompt.dtype == np.uint32


def test_the_dualpath_like_selection_is_close_to_the_paper(data_dir: Path) -> None:
    file = data_dir / "weka_claude_code" / "dualpath_like_57.jsonl"
    stats = describe(read_trace(file))
    # Read with blocks of 16 instead of 64 tokens: every count by four (its README).
    assert stats.context_tokens / 4 == pytest.approx(31_600, rel=0.05)
    assert stats.append_tokens / 4 < 600
    assert stats.hit_rate > 0.98
