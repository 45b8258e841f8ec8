from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import InvalidArgument, WorkloadError
from kvtransfer.workload import TABLE_2, describe, from_trace, generate, read_messages, read_trace
from kvtransfer.workload.generator import trajectories
from kvtransfer.workload.sessions import derive_tokens

HEADER = {"schema": "kvt-sessions-v1", "block_size": 64}
SESSION = {
    "id": "s1",
    "turns": [
        {"in": 200, "out": 10, "h": [[1, 3]]},
        {"in": 330, "out": 5, "k": 3, "h": [[9, 2]]},
        {"in": 130, "out": 0, "p": 0, "k": 1, "h": [[50, 1]]},
    ],
}


def write(path: Path, *lines: object, zipped: bool = False) -> Path:
    text = "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    return path


@pytest.mark.parametrize("zipped", [False, True])
def test_sessions_are_read_with_their_blocks(tmp_path: Path, zipped: bool) -> None:
    (session,) = read_trace(write(tmp_path / "t", HEADER, SESSION, zipped=zipped))
    assert [t.block_ids.tolist() for t in session.turns] == [
        [1, 2, 3],
        [1, 2, 3, 9, 10],
        [1, 50],
    ]
    assert [t.output_tokens for t in session.turns] == [10, 5, 0]


def turn(**changes: object) -> dict[str, object]:
    return {"id": "s", "turns": [{"in": 200, "out": 1, "h": [[1, 3]], **changes}]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["not json"], "line 1"),
        ([{"schema": "other", "block_size": 64}], "schema"),
        ([{"schema": "kvt-sessions-v1", "block_size": 0}], "block_size"),
        ([HEADER, "{"], "line 2"),
        ([HEADER, {"id": "s"}], "turns"),
        ([HEADER, {"id": "s", "turns": [{"out": 1}]}], "in"),
        ([HEADER, turn(h=[[1, 2]])], "turn 0: k and h"),
        ([HEADER, turn(h=[[1, -3], [1, 6]])], "turn 0"),
        ([HEADER, turn(h=[["x", 3]])], "line 2"),
        ([HEADER, turn(k=1)], "no earlier turn"),
        ([HEADER, turn(p=7, k=1)], "no earlier turn"),
        ([HEADER, turn(**{"in": 10**12})], "input tokens"),
        ([HEADER, turn(**{"in": -5})], "input tokens"),
        ([HEADER, turn(out=-1)], "output tokens"),
        (
            [
                HEADER,
                {
                    "id": "s",
                    "turns": [
                        {"in": 64, "out": 1, "h": [[1, 1]]},
                        {"in": 640, "out": 1, "k": 9, "h": [[5, 1]]},
                    ],
                },
            ],
            "exceeds the 1 blocks",
        ),
        ([{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}], "hash_ids"),
        ([{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}], "input tokens"),
        ([""], "empty"),
    ],
)
def test_malformed_lines_are_errors_that_name_their_place(
    tmp_path: Path, lines: list[object], message: str
) -> None:
    path = write(tmp_path / "bad", *lines)
    with pytest.raises(WorkloadError, match=message) as caught:
        list(read_trace(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_missing_or_cut_are_errors(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="No such file"):
        list(read_trace(tmp_path / "nothing"))
    whole = write(tmp_path / "z", HEADER, *[SESSION] * 50, zipped=True).read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-20])
    with pytest.raises(WorkloadError):
        list(read_trace(tmp_path / "cut"))


@given(st.binary(max_size=300))
def test_no_bytes_crash_the_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("x") / "fuzz"
    path.write_bytes(data)
    with contextlib.suppress(WorkloadError):
        list(read_trace(path))
    with contextlib.suppress(WorkloadError):
        read_messages(path)


def test_mooncake_requests_share_ids_globally(tmp_path: Path) -> None:
    line = {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 6]}
    sessions = list(read_trace(write(tmp_path / "m", line, line)))
    assert [s.turns[0].block_ids.tolist() for s in sessions] == [[4, 5], [4, 5]]
    assert sessions[0].turns[0].arrival_s == 1.5
    a, b = (from_trace(s, 1000, scale=8) for s in sessions)
    same = 2 * 64
    np.testing.assert_array_equal(a.turns[0].append[:same], b.turns[0].append[:same])
    stats = describe(sessions)
    assert stats.hit_rate == pytest.approx(2 * 512 / 2200)


@pytest.mark.parametrize("scale", [1, 4, 64])
def test_tokens_of_a_trace_agree_exactly_as_far_as_its_blocks(tmp_path: Path, scale: int) -> None:
    (trace,) = read_trace(write(tmp_path / "t", HEADER, SESSION))
    session = from_trace(trace, 1024, scale=scale)
    prompts, so_far = [], np.empty(0, np.uint32)
    for t in session.turns:
        prompts.append(t.prompt(so_far))
        so_far = np.concatenate([prompts[-1], np.full(t.generate, 7, np.uint32)])
    per_block = 64 // scale
    np.testing.assert_array_equal(prompts[0][: 3 * per_block], prompts[1][: 3 * per_block])
    np.testing.assert_array_equal(prompts[0][:per_block], prompts[2][:per_block])
    assert [len(p) for p in prompts] == [
        len(t.block_ids) * per_block + t.input_tokens % 64 // scale for t in trace.turns
    ]
    assert all(t.generate >= 1 for t in session.turns)
    with pytest.raises(InvalidArgument, match="divide"):
        from_trace(trace, 1024, scale=5)


def test_derived_tokens_are_the_same_in_every_version() -> None:
    assert derive_tokens("s", [1, 2], 3, 1000).tolist() == GOLDEN_TOKENS
    assert derive_tokens("s", [2], 3, 1000).tolist() == GOLDEN_TOKENS[3:]
    assert derive_tokens("t", [1], 3, 1000).tolist() != GOLDEN_TOKENS[:3]


GOLDEN_TOKENS = [338, 204, 629, 394, 224, 430]


@pytest.mark.parametrize("name", TABLE_2)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_generator_matches_table_2_within_5_percent(name: str, seed: int) -> None:
    spec = TABLE_2[name]
    made = trajectories(spec, 500, seed)
    means = {
        "turns": np.mean([len(t.append) for t in made]),
        "append": np.mean([t.append.mean() for t in made]),
        "generated": np.mean([t.generated.mean() for t in made]),
        "total": np.mean([t.total for t in made]),
        "context": np.mean([t.context.mean() for t in made]),
    }
    for field, value in means.items():
        assert value == pytest.approx(getattr(spec, field), rel=0.05), field
    assert max(t.total for t in made) <= spec.max_length * 1.01


def test_generated_sessions_are_seeded_and_keep_their_context() -> None:
    a, b = (generate(TABLE_2["32k"], 2, 1024, seed=3, scale=8, max_turns=4) for _ in range(2))
    for x, y in zip(a, b, strict=True):
        for t, u in zip(x.turns, y.turns, strict=True):
            np.testing.assert_array_equal(t.append, u.append)
            assert t.keep is None
    assert (
        generate(TABLE_2["32k"], 1, 1024, seed=4)[0].turns[0].append.tolist()
        != a[0].turns[0].append.tolist()
    )


def test_message_lists_become_a_turn_per_assistant_message(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(
        json.dumps(
            [
                [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "hello"},
                    {"role": "assistant", "content": "hi there"},
                    {"role": "tool", "content": {"a": 1}},
                    {"role": "assistant", "content": None, "tool_calls": [{"f": 1}]},
                ]
            ]
        )
    )
    (session,) = read_messages(path)
    first, second = session.turns
    assert first.keep == 0
    assert bytes(first.append.tolist()).decode().endswith("hello<|im_end|>\n")
    assert first.generate == len("<|im_start|>assistant\nhi there<|im_end|>\n")
    assert second.keep == len(first.append)
    assert "hi there" in bytes(second.append.tolist()).decode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "m.json"),
        ("[]", "list of conversations"),
        ("[5]", "conversation 0"),
        ('[{"x": 1}]', "conversation 0"),
        ('[[{"content": "x"}]]', "message 0"),
        ('[["x"]]', "message 0"),
    ],
)
def test_bad_message_files_are_errors(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_messages(path)


def test_the_public_traces_have_the_statistics_their_readme_states(data_dir: Path) -> None:
    stats = describe(read_trace(data_dir / "weka_claude_code" / "ctx64k_30.jsonl"))
    assert (stats.sessions, stats.requests) == (30, 2209)
    assert stats.hit_rate == pytest.approx(0.970, abs=0.002)
    stats = describe(read_trace(data_dir / "mooncake" / "conversation_trace.jsonl.gz"))
    assert stats.requests == 12031
    assert stats.hit_rate == pytest.approx(0.373, abs=0.002)
    file = data_dir / "tau_bench" / "gpt4o_airline_text_longest20.json.gz"
    assert len(read_messages(file)) == 20
