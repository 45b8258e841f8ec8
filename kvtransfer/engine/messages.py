"""The messages between client, scheduler and engines: msgpack of tagged structs, never pickle.

    client    --Submit--------------------> scheduler --Result--> client
    scheduler --Assign--> PE and DE          engines --Hello, Report, Finished, GaveUp--> scheduler
    DE        --Admit---> PE                 PE --PeerHello, Pull, PrefillDone, Restart--> DE

Token ids and offsets travel as little-endian bytes. A message that doesn't decode is dropped by its
receiver with a warning: a hostile or stale peer can't crash an engine.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvtransfer.errors import Mismatch

__all__ = [
    "Admit",
    "Assign",
    "EngineLost",
    "Finished",
    "GaveUp",
    "Hello",
    "Journal",
    "LogitsInfo",
    "Message",
    "PeerHello",
    "PrefillDone",
    "PrefillStats",
    "Pull",
    "Report",
    "Restart",
    "Result",
    "Shutdown",
    "Started",
    "Submit",
    "decode_message",
    "encode_message",
    "pack_tokens",
    "unpack_tokens",
]

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 30


class _Message(msgspec.Struct, tag=True, kw_only=True):
    pass


class Hello(_Message):
    """An engine presents itself; ``epoch`` is new for every life of the process."""

    engine: str
    kind: str  # "prefill" | "decode"
    epoch: int
    capacity_tokens: int = 0
    version: int = WIRE_VERSION


class Started(_Message):
    """scheduler -> client and engines: everyone is here. ``decode`` lists the DEs to connect to."""

    prefill: list[str]
    decode: list[str]


class Report(_Message):
    """seq_e, tok_e, read_q, free HBM; ``seen`` are the request ids contained in them. The last two:
    what the policy ``aware`` looks at (scheduler.EngineReport)."""

    engine: str
    unfinished_requests: int
    unfinished_tokens: int
    read_queue_tokens: int
    free_tokens: int
    seen: list[int]
    read_tokens_per_s: float = 0.0  # of its storage while it was reading, 0 before it ever did
    network_tokens: int = 0
    memory_tokens: int = 0


class Submit(_Message):
    request_id: int
    tokens: bytes
    num_generate: int


class Assign(_Message):
    """scheduler -> the request's PE and DE."""

    request_id: int
    life: int  # grows with every assignment of the request; older ones are stale
    tokens: bytes
    num_generate: int
    prefill: str
    decode: str
    read_path: str
    cached_tokens: int = 0  # of the prefix, as far as is known
    decode_tokens: int = 0  # of them, what the DE reads; the rest is the PE's


class Admit(_Message):
    """DE -> PE: the DE buffer is reserved. ``block_starts`` are u64 offsets of its Full Blocks."""

    request_id: int
    life: int
    attempt: int
    hit_blocks: int  # the head of the prefix, which the DE is loading; 0 on the PE path
    max_hit_blocks: int
    pe_reads: bool  # the PE loads what follows of the prefix
    block_starts: bytes
    tag: int


class PeerHello(_Message):
    engine: str


class Pull(_Message):
    """PE -> DE: tell me, on ``tag``, which layers of the hit prefix can be read."""

    request_id: int
    life: int
    attempt: int
    tag: int


class LogitsInfo(_Message):
    """``digest`` of the float32 logits row ("" without journal); gap between the two best."""

    digest: str
    gap: float


class PrefillStats(_Message):
    """Times in seconds, bytes where named; ``stall_s`` and ``compute_s`` per layer."""

    hit_blocks: int  # of the whole prefix, whoever loaded it
    chunks: int
    load_s: float
    load_end_ns: int
    loaded_bytes: int
    stall_s: list[float]
    compute_s: list[float]
    begin_ns: int
    first_token_ns: int
    device_tokens: int  # peak KV tokens per layer slot of this request's forwards


class PrefillDone(_Message):
    request_id: int
    life: int
    attempt: int
    arrivals: int  # immediates per layer the DE must have counted
    first_token: int
    logits: LogitsInfo
    stats: PrefillStats


class Restart(_Message):
    """PE -> DE: this attempt failed and is drained; admit again with at most so many hit blocks.

    ``unwell``: the side that could not read from its storage, or so slowly that the other side, which
    has read its own part of a split, is to read this one, too."""

    request_id: int
    life: int
    attempt: int
    max_hit_blocks: int
    reason: str
    unwell: Literal["", "pe", "de"] = ""


class Finished(_Message):
    """DE -> scheduler. ``error`` empty: ``tokens`` were generated and every full block persisted."""

    request_id: int
    life: int
    error: str = ""
    tokens: bytes = b""
    logits: list[LogitsInfo] = []
    read_path: str = ""
    prefill: str = ""
    decode: str = ""
    load_s: float = 0.0
    load_end_ns: int = 0
    loaded_bytes: int = 0
    attempts: int = 1
    failures: list[str] = []
    fresh_blocks: list[bool] = []
    stats: PrefillStats | None = None
    decode_begin_ns: int = 0
    finished_ns: int = 0


class GaveUp(_Message):
    """An engine can't serve a request any more; it must be assigned anew."""

    request_id: int
    life: int
    reason: str


class Result(_Message):
    """scheduler -> client."""

    finished: Finished
    submitted_ns: int
    assigned_ns: int
    lives: int


class EngineLost(_Message):
    """launcher -> scheduler -> engines."""

    engine: str
    reason: str


class Shutdown(_Message):
    pass


class Journal(_Message):
    """engine -> scheduler -> client at shutdown: what it computed, its trace and its counters."""

    engine: str
    forwards: list[Any] = []
    trace: bytes = b""  # TraceEvent records of the core
    spans: list[tuple[str, int, int, int]] = []  # (name, request, begin ns, end ns)
    counters: dict[str, Any] = {}


Message: TypeAlias = (
    Hello
    | Started
    | Report
    | Submit
    | Assign
    | Admit
    | PeerHello
    | Pull
    | PrefillDone
    | Restart
    | Finished
    | GaveUp
    | Result
    | EngineLost
    | Shutdown
    | Journal
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_message(data: bytes) -> Message:
    """Raises Mismatch for anything that isn't one of ours."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise Mismatch(f"message of {len(data)} bytes")
    try:
        message: Message = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise Mismatch(f"not a message of ours: {error}") from error
    return message


def pack_tokens(tokens: npt.ArrayLike) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<u4").tobytes()


def unpack_tokens(data: bytes) -> npt.NDArray[np.uint32]:
    if len(data) % 4:
        raise Mismatch(f"{len(data)} bytes are no u32 token ids")
    return np.frombuffer(data, "<u4").astype(np.uint32)
