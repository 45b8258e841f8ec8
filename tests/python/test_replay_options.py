"""The helpers behind `kvtransfer replay`: sizes, inputs, profiles, JSON."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from records import make_record, make_run

from kvtransfer.cli import replay
from kvtransfer.errors import InvalidArgument, WorkloadError
from kvtransfer.models import load_model
from kvtransfer.workload import TABLE_2, Session, Turn, generate
from kvtransfer.workload.messages import byte_tokens


def turn(append: int, generate: int, keep: int | None = None) -> Turn:
    return Turn(np.zeros(append, np.uint32), generate, keep)


def test_memory_is_sized_for_every_session_at_its_longest() -> None:
    sessions = [
        Session("a", (turn(100, 10), turn(50, 10))),
        Session("b", (turn(500, 5), turn(10, 5, keep=20))),  # the context shrinks
    ]
    sizes = replay._sizes(sessions, 64, None)
    longest = [170 + 64, 505 + 64]
    assert sizes["decode_tokens"] == 2 * sum(longest)
    assert sizes["pool_blocks"] >= sum(-(-n // 64) for n in longest)
    assert sizes["prefill_tokens"] >= max(longest)
    assert replay._sizes(sessions, 64, 7)["pool_blocks"] == 7


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([16, 64, 100]),
)
def test_no_turn_ever_needs_more_than_was_sized(
    shapes: list[list[tuple[int, int]]], block: int
) -> None:
    sessions = [
        Session(str(i), tuple(turn(a, g) for a, g in shape)) for i, shape in enumerate(shapes)
    ]
    sizes = replay._sizes(sessions, block, None)
    for session in sessions:
        so_far = np.empty(0, np.uint32)
        for t in session.turns:
            prompt = t.prompt(so_far)
            so_far = np.concatenate([prompt, np.zeros(t.generate, np.uint32)])
            assert len(prompt) <= sizes["prefill_tokens"]
            assert len(so_far) <= sizes["decode_tokens"]
            assert -(-len(prompt) // block) <= sizes["pool_blocks"]


def test_without_files_the_generator_makes_two_sessions() -> None:
    model = load_model("tiny")
    made = replay._read_work([], model, None, None, None, 3)
    same = generate(
        TABLE_2["32k"], 2, 1024, seed=3, scale=replay.DEMO_SCALE, max_turns=replay.DEMO_TURNS
    )
    assert [s.session_id for s in made] == [s.session_id for s in same]
    assert len(made[0].turns) == replay.DEMO_TURNS
    assert len(replay._read_work([], model, 2, 3, 16, 0)) == 3


def test_traces_and_message_lists_are_told_apart_by_name(tmp_path: Path) -> None:
    model = load_model("tiny")
    talk = tmp_path / "talk.json.gz"
    messages = [[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]] * 3
    talk.write_bytes(gzip.compress(json.dumps(messages).encode()))
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    trace.write_text("\n".join([json.dumps(line)] * 5))
    assert len(replay._read_work([talk], model, None, 2, None, 0)) == 2
    assert len(replay._read_work([trace], model, None, 4, 8, 0)) == 4
    with pytest.raises(InvalidArgument, match="--scale is for traces"):
        replay._read_work([talk], model, None, None, 2, 0)


def test_input_without_any_turn_is_an_error(tmp_path: Path) -> None:
    empty = tmp_path / "talk.json"
    empty.write_text('[[{"role": "user", "content": "nobody answers"}]]')
    with pytest.raises(WorkloadError, match="no sessions with turns"):
        replay._read_work([empty], load_model("tiny"), None, None, None, 0)


def test_a_model_without_a_tokenizer_reads_text_as_bytes() -> None:
    assert replay._encoder(load_model("tiny"))("né") == byte_tokens("né") == [110, 195, 169]


def test_profiles_are_read_and_bad_ones_refused(tmp_path: Path) -> None:
    good = {"time_fixed_s": 0.1, "time_per_token_s": 1e-4, "time_per_pair_s": 1e-8, "beta": 9}
    file = tmp_path / "p.json"
    file.write_text(json.dumps({**good, "model": "tiny"}))
    assert replay._read_profile(file) == good
    assert replay._read_profile(None) == {}
    for bad in ("", "[]", "{}", '{"beta": 1}'):
        file.write_text(bad)
        with pytest.raises(InvalidArgument, match="not a profile"):
            replay._read_profile(file)


def test_the_json_of_a_run_holds_its_figures_and_no_arrays() -> None:
    other = make_record(read_path="de", request_id=2, pe_bytes=0, de_bytes=1000)
    run = make_run(make_record(), other, path="auto")
    row = json.loads(json.dumps(replay._to_json(run)))
    assert row["bytes_by_path"] == {"pe": 1000, "de": 1000}
    assert row["config"]["path"] == "auto"
    first = row["records"][0]
    assert first["prompt"] == 130, "its length"
    assert first["generated"] == [0, 1, 2]
    assert first["overlap"] == pytest.approx(0.5)
    assert first["logits"] == [0.5] * 3


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_negative_rates_and_nan_are_refused(value: float) -> None:
    with pytest.raises(InvalidArgument, match="--storage-mbps"):
        replay._check_not_negative(storage_mbps=value)
    replay._check_not_negative(storage_mbps=0.0, network_mbps=None)


def test_counts_must_be_positive() -> None:
    with pytest.raises(InvalidArgument, match="--pool-blocks must be positive, got 0"):
        replay._check_positive(pool_blocks=0)
    replay._check_positive(turns=None, sessions=1)
