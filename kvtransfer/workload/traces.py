"""Readers of id-only traces: `kvt-sessions-v1` and Mooncake JSONL, plain or gzipped.

Such traces name the blocks of each prompt but hold no text. Every malformed line is an error that
names file, line and field; nothing is guessed or skipped.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from kvtransfer.errors import WorkloadError

__all__ = ["MAX_INPUT_TOKENS", "TraceSession", "TraceTurn", "read_trace"]

_T = TypeVar("_T")
MAX_INPUT_TOKENS = 1 << 24
MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceTurn:
    """One request: ids of the full blocks of its prompt, and its sizes in tokens."""

    block_ids: npt.NDArray[np.int64]
    input_tokens: int
    output_tokens: int
    think_s: float = 0.0
    arrival_s: float = 0.0


@dataclass(frozen=True)
class TraceSession:
    session_id: str
    block_tokens: int
    turns: tuple[TraceTurn, ...]
    # Ids mean the same in every session (Mooncake), or in their own only (kvt-sessions-v1).
    global_ids: bool = False


class _Turn(msgspec.Struct, rename={"input": "in", "output": "out"}):
    input: int
    output: int
    h: list[tuple[int, int]] = []
    p: int | None = None
    k: int = 0
    think: float = 0.0
    t: float = 0.0


class _Session(msgspec.Struct):
    id: str
    turns: list[_Turn]


class _Header(msgspec.Struct):
    schema: str
    block_size: int


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: str | Path) -> Iterator[TraceSession]:
    """Sessions of a trace file, in order; the format is told by the first line.

    Raises WorkloadError naming the file and line for anything malformed.
    """
    path = Path(path)
    with _open(path) as file:
        try:
            first = file.readline()
        except (OSError, EOFError) as error:
            raise WorkloadError(f"{path}: {error}") from error
        if not first.strip():
            raise WorkloadError(f"{path}: line 1: the file is empty")
        if b'"schema"' in first:
            yield from _read_sessions(path, first, file)
        else:
            yield from _read_mooncake(path, first, file)


def _open(path: Path) -> IO[bytes]:
    try:
        with path.open("rb") as probe:
            zipped = probe.read(2) == b"\x1f\x8b"
        return cast(IO[bytes], gzip.open(path, "rb")) if zipped else path.open("rb")
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from error


def _lines(path: Path, file: IO[bytes], start: int) -> Iterator[tuple[int, bytes]]:
    number = start
    while True:
        try:
            line = file.readline()
        except (OSError, EOFError) as error:
            raise WorkloadError(f"{path}: line {number}: {error}") from error
        if not line:
            return
        if line.strip():
            yield number, line
        number += 1


def _read_sessions(path: Path, first: bytes, file: IO[bytes]) -> Iterator[TraceSession]:
    header = _decode(first, _Header, f"{path}: line 1")
    if header.schema != "kvt-sessions-v1":
        raise WorkloadError(f"{path}: line 1: unknown schema {header.schema!r}")
    if not 1 <= header.block_size <= 1 << 16:
        raise WorkloadError(f"{path}: line 1: block_size {header.block_size} is out of range")
    for number, line in _lines(path, file, 2):
        where = f"{path}: line {number}"
        raw = _decode(line, _Session, where)
        turns: list[TraceTurn] = []
        for index, turn in enumerate(raw.turns):
            turns.append(_expand(turn, index, turns, header.block_size, f"{where}: turn {index}"))
        yield TraceSession(raw.id, header.block_size, tuple(turns))


def _expand(
    turn: _Turn, index: int, before: list[TraceTurn], block_tokens: int, where: str
) -> TraceTurn:
    _check_sizes(turn.input, turn.output, where)
    parent = index - 1 if turn.p is None else turn.p
    if turn.k and not 0 <= parent < index:
        raise WorkloadError(f"{where}: p={parent} is no earlier turn")
    base = before[parent].block_ids if 0 <= parent < index else np.empty(0, np.int64)
    if not 0 <= turn.k <= len(base):
        raise WorkloadError(f"{where}: k={turn.k} exceeds the {len(base)} blocks of turn {parent}")
    wanted = turn.input // block_tokens
    if any(count < 0 for _, count in turn.h) or sum(c for _, c in turn.h) + turn.k != wanted:
        raise WorkloadError(f"{where}: k and h give another number of blocks than in={turn.input}")
    runs = [np.arange(first, first + count, dtype=np.int64) for first, count in turn.h]
    ids = np.concatenate([base[: turn.k], *runs]) if runs else base[: turn.k]
    return TraceTurn(ids, turn.input, turn.output, turn.think, turn.t)


def _read_mooncake(path: Path, first: bytes, file: IO[bytes]) -> Iterator[TraceSession]:
    yield _mooncake_session(first, f"{path}: line 1", 1)
    for number, line in _lines(path, file, 2):
        yield _mooncake_session(line, f"{path}: line {number}", number)


def _mooncake_session(line: bytes, where: str, number: int) -> TraceSession:
    raw = _decode(line, _Mooncake, where)
    _check_sizes(raw.input_length, raw.output_length, where)
    wanted = -(-raw.input_length // MOONCAKE_BLOCK_TOKENS)
    if len(raw.hash_ids) != wanted:
        raise WorkloadError(
            f"{where}: {len(raw.hash_ids)} hash_ids for {raw.input_length} tokens, "
            f"expected {wanted}"
        )
    full = raw.input_length // MOONCAKE_BLOCK_TOKENS
    turn = TraceTurn(
        np.array(raw.hash_ids[:full], np.int64),
        raw.input_length,
        raw.output_length,
        arrival_s=raw.timestamp / 1000,
    )
    return TraceSession(f"request-{number}", MOONCAKE_BLOCK_TOKENS, (turn,), global_ids=True)


def _check_sizes(input_tokens: int, output_tokens: int, where: str) -> None:
    if not 1 <= input_tokens <= MAX_INPUT_TOKENS:
        raise WorkloadError(f"{where}: {input_tokens} input tokens (must be 1..{MAX_INPUT_TOKENS})")
    if not 0 <= output_tokens <= MAX_INPUT_TOKENS:
        raise WorkloadError(
            f"{where}: {output_tokens} output tokens (must be 0..{MAX_INPUT_TOKENS})"
        )


def _decode(line: bytes, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{where}: {error}") from error
