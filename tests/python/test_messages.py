from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.messages import (
    Assign,
    Pull,
    Shutdown,
    decode_message,
    encode_message,
    pack_tokens,
    unpack_tokens,
)
from kvtransfer.errors import InvalidArgument, Mismatch


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_messages_survive_the_wire(tokens: list[int]) -> None:
    message = Assign(
        request_id=5,
        life=1,
        tokens=pack_tokens(tokens),
        num_generate=3,
        prefill="pe0",
        decode="de0",
        read_path="pe",
    )
    back = decode_message(encode_message(message))
    assert back == message
    assert unpack_tokens(message.tokens).tolist() == tokens


@given(st.binary(max_size=200))
def test_hostile_bytes_are_a_mismatch_and_nothing_else(data: bytes) -> None:
    with pytest.raises(Mismatch):
        decode_message(data)


@given(st.data())
def test_damaged_messages_never_crash(data: st.DataObject) -> None:
    raw = bytearray(encode_message(Pull(request_id=1, life=2, attempt=3, tag=4)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Mismatch):
        decode_message(bytes(raw))


def test_fields_of_other_types_are_refused() -> None:
    raw = msgspec.msgpack.encode(
        {"type": "Pull", "request_id": "x", "life": 1, "attempt": 0, "tag": 0}
    )
    with pytest.raises(Mismatch):
        decode_message(raw)
    assert decode_message(encode_message(Shutdown())) == Shutdown()
    with pytest.raises(Mismatch, match="u32"):
        unpack_tokens(b"123")
    assert np.array_equal(unpack_tokens(b"\x01\0\0\0"), [1])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_tokens", 0),
        ("num_prefill", 0),
        ("num_decode", 1000),
        ("pool_blocks", 0),
        ("deadline_s", 0.0),
        ("namespace", "ab"),
    ],
)
def test_absurd_configurations_are_refused(field: str, value: object) -> None:
    good: dict[str, object] = {
        "name": "x",
        "store": "/tmp/x",
        "namespace": "00" * 32,
        "layer_planes": [[4]],
    }
    ClusterConfig(**good)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=field):
        ClusterConfig(**{**good, field: value})  # type: ignore[arg-type]
