from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer import BlockLayout, Namespace, _keychain, chain_keys
from kvtransfer.errors import InvalidArgument
from kvtransfer.keys import chain_in_python, opaque_keys

BASE = Namespace("tiny", "r1", "float32", BlockLayout(12, 64, [128] * 4))


def test_golden_vectors() -> None:
    """Keys written today must be found by every later version."""
    root = BASE.digest()
    keys = chain_keys(root, np.arange(130), 64)
    assert root.hex() == GOLDEN_ROOT
    assert [k.tobytes().hex() for k in keys] == GOLDEN_KEYS


GOLDEN_ROOT = "a9e8c2df1ac8d028596999eda0975d824e6d4f502288716d7e432201ed998b2a"
GOLDEN_KEYS = [
    "68abb60881eb29fb6fb33c0f5cdd5795710e1a76810fffe9a4a418f5ba84398c",
    "8470c8dd39b2e80a25c1f04940e0c5ad2588e979473af8496519db889dd4d64e",
]


def test_a_key_is_the_sha256_of_its_parent_and_its_tokens() -> None:
    tokens = np.arange(32, dtype=np.uint32)
    keys = chain_keys(bytes(32), tokens, 16)
    first = hashlib.sha256(bytes(32) + tokens[:16].astype("<u4").tobytes()).digest()
    second = hashlib.sha256(first + tokens[16:].astype("<u4").tobytes()).digest()
    assert keys.tobytes() == first + second


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, model="tiny2"),
        replace(BASE, revision="r2"),
        replace(BASE, dtype="bfloat16"),
        replace(BASE, layout=BlockLayout(12, 64, [256] * 2)),
        replace(BASE, layout=BlockLayout(12, 32, [128] * 4)),
        replace(BASE, layout=BlockLayout(11, 64, [128] * 4)),
        replace(BASE, shard=(0, 2)),
        replace(BASE, shard=(1, 2)),
        replace(BASE, adapter="lora"),
        replace(BASE, salt="tenant"),
        replace(BASE, model="tinyr1", revision=""),
        replace(BASE, adapter="", salt="lora"),
    ],
)
def test_namespaces_that_differ_in_anything_never_share_a_key(other: Namespace) -> None:
    assert other.digest() != BASE.digest()
    tokens = np.arange(64)
    ours = chain_keys(BASE.digest(), tokens, 64)
    theirs = chain_keys(other.digest(), tokens, 64)
    assert ours.tobytes() != theirs.tobytes()


def test_keys_do_not_depend_on_the_process() -> None:
    code = (
        "import numpy as np; from kvtransfer import chain_keys;"
        "print(chain_keys(bytes(32), np.arange(64), 16).tobytes().hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=200),
    st.integers(1, 40),
    st.integers(0, 199),
    st.integers(0, 2**32 - 1),
)
def test_keys_agree_exactly_as_far_as_the_tokens_do(
    tokens: list[int], block: int, at: int, value: int
) -> None:
    keys = chain_keys(bytes(32), tokens, block)
    assert len(keys) == len(tokens) // block
    if not tokens:
        return
    at %= len(tokens)
    changed = [*tokens[:at], value, *tokens[at + 1 :]]
    other = chain_keys(bytes(32), changed, block)
    same = [a.tobytes() == b.tobytes() for a, b in zip(keys, other, strict=True)]
    first = len(keys) if value == tokens[at] else at // block
    assert same == [i < first for i in range(len(keys))]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=200), st.integers(1, 20))
def test_a_chain_can_be_extended_from_its_last_key(tokens: list[int], block: int) -> None:
    whole = chain_keys(bytes(32), tokens, block)
    for cut in range(len(whole)):
        parent = bytes(32) if cut == 0 else whole[cut - 1].tobytes()
        rest = chain_keys(parent, tokens, block, start=cut * block)
        assert rest.tobytes() == whole[cut:].tobytes()


@pytest.mark.parametrize(
    "tokens",
    [[-1, 2], [2**32], [1.5, 2.5], [[1, 2], [3, 4]]],
)
def test_token_ids_that_are_none_are_refused(tokens: list[object]) -> None:
    with pytest.raises(InvalidArgument):
        chain_keys(bytes(32), tokens, 1)  # type: ignore[arg-type]


def test_bad_parents_and_block_sizes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="32 bytes"):
        chain_keys(b"short", [1], 1)
    with pytest.raises(InvalidArgument, match="positive"):
        chain_keys(bytes(32), [1], 0)


def test_engine_hashes_are_taken_as_opaque_bytes() -> None:
    exact, short = bytes(range(32)), b"\x01\x02"
    keys = opaque_keys([exact, short])
    assert keys[0].tobytes() == exact
    assert keys[1].tobytes() == hashlib.sha256(b"opaque" + short).digest()
    assert opaque_keys([b"\x01\x02\x00"])[0].tobytes() != keys[1].tobytes()
    assert opaque_keys([]).shape == (0, 32)


@given(st.binary(max_size=600), st.integers(1, 50))
def test_the_compiled_chain_equals_the_plain_one(data: bytes, block: int) -> None:
    if not _keychain.available():
        pytest.skip("no libcrypto to load on this machine")
    blocks = len(data) // block
    source = np.frombuffer(data, np.uint8)
    a, b = np.empty(blocks * 32, np.uint8), np.empty(blocks * 32, np.uint8)
    _keychain.chain(bytes(32), source, block, a)
    chain_in_python(bytes(32), source, block, b)
    assert a.tobytes() == b.tobytes()
    with pytest.raises(ValueError, match="sizes"):
        _keychain.chain(bytes(32), source, block, np.empty((blocks + 1) * 32, np.uint8))
