"""Replays sessions through a cluster: the next turn of a session goes out when the last came back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtransfer.engine.cluster import Cluster
from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.messages import Finished, Journal, LogitsInfo, Result, unpack_tokens
from kvtransfer.errors import ClusterError, WorkloadError
from kvtransfer.keys import chain_keys
from kvtransfer.workload import Session

__all__ = ["ReplayRun", "TurnRecord", "run_replay"]


@dataclass(frozen=True)
class TurnRecord:
    """What one turn did. Times in seconds; ``stall_s`` and ``compute_s`` per layer."""

    session_id: str
    session: int
    turn: int
    request_id: int
    prompt: npt.NDArray[np.uint32]
    generated: npt.NDArray[np.uint32]
    read_path: str
    prefill: str
    decode: str
    hit_blocks: int
    expected_hit_blocks: int
    chunks: int
    pe_bytes: int  # read from storage by either side
    de_bytes: int
    ttft_s: float
    load_s: float
    exposed_s: float  # from the end of the load to the first token: compute it did not cover
    decode_s: float
    stall_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    device_tokens: int
    attempts: int
    lives: int
    failures: tuple[str, ...]
    fresh_blocks: tuple[bool, ...]
    logits: tuple[LogitsInfo, ...]

    @property
    def loaded_bytes(self) -> int:
        return self.pe_bytes + self.de_bytes

    @property
    def total_compute_s(self) -> float:
        return sum(self.compute_s)

    @property
    def overlap(self) -> float:
        """1 - stall / load: the share of the load hidden under computation and queueing."""
        return 1.0 - min(sum(self.stall_s) / self.load_s, 1.0) if self.load_s > 0 else 1.0


@dataclass
class ReplayRun:
    config: ClusterConfig
    records: list[TurnRecord] = field(default_factory=list)
    journals: dict[str, Journal] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    wall_s: float = 0.0

    def bytes_by_path(self) -> dict[str, int]:
        """Bytes read from storage per side."""
        return {
            "pe": sum(record.pe_bytes for record in self.records),
            "de": sum(record.de_bytes for record in self.records),
        }

    @property
    def hit_rate(self) -> float:
        tokens = sum(len(r.prompt) for r in self.records)
        hits = sum(r.hit_blocks for r in self.records) * self.config.block_tokens
        return hits / max(tokens, 1)

    @property
    def hidden(self) -> float:
        """Share of min(load, compute) that ran under the other, over the turns that loaded."""
        turns = [r for r in self.records if r.load_s > 0]
        most = sum(min(r.load_s, r.total_compute_s) for r in turns)
        shown = sum(min(r.exposed_s, r.load_s, r.total_compute_s) for r in turns)
        return 1.0 - shown / most if most > 0 else 1.0


class _Expected:
    """Which blocks the store should hold, from the finished requests alone."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._keys: set[bytes] = set()

    def hits(self, prompt: npt.NDArray[np.uint32]) -> int:
        keys = chain_keys(bytes(32), prompt[:-1], self._block_tokens)
        found = (i for i, key in enumerate(keys) if key.tobytes() not in self._keys)
        return next(found, len(keys))

    def add(self, tokens: npt.NDArray[np.uint32]) -> None:
        """The last generated token has no KV yet."""
        keys = chain_keys(bytes(32), tokens[:-1], self._block_tokens)
        self._keys.update(key.tobytes() for key in keys)


def run_replay(
    config: ClusterConfig,
    sessions: Sequence[Session],
    on_record: Callable[[TurnRecord], None] = lambda _: None,
    on_start: Callable[[Cluster], None] = lambda _: None,
) -> ReplayRun:
    """Serves every turn of every session, sessions concurrently, turns in order.

    Raises ClusterError when a turn can't be served, with the engine's reason.
    """
    if not any(s.turns for s in sessions):
        raise WorkloadError("the sessions have no turns")
    run = ReplayRun(config)
    with Cluster(config) as cluster:
        on_start(cluster)
        begin = time.monotonic()
        _drive(cluster, sessions, run, on_record)
        run.wall_s = time.monotonic() - begin
    run.journals, run.lost = cluster.journals, cluster.lost
    return run


@dataclass
class _Progress:
    """Where one session stands."""

    so_far: npt.NDArray[np.uint32]
    prompt: npt.NDArray[np.uint32]
    turn: int = 0
    expected: int = 0


def _drive(
    cluster: Cluster,
    sessions: Sequence[Session],
    run: ReplayRun,
    on_record: Callable[[TurnRecord], None],
) -> None:
    empty = np.empty(0, np.uint32)
    progress = [_Progress(empty, empty) for _ in sessions]
    expected = _Expected(run.config.block_tokens)
    waiting: dict[int, int] = {}  # request -> session
    next_id = 1

    def submit(index: int) -> None:
        nonlocal next_id
        state, turn = progress[index], sessions[index].turns[progress[index].turn]
        state.prompt = turn.prompt(state.so_far)
        state.expected = expected.hits(state.prompt)
        waiting[next_id] = index
        cluster.submit(next_id, state.prompt, turn.generate)
        next_id += 1

    for index, session in enumerate(sessions):
        if session.turns:
            submit(index)
    for result in cluster.results(_patience(run.config)):
        index = waiting.pop(result.finished.request_id)
        state = progress[index]
        if result.finished.error:
            raise ClusterError(
                f"session {sessions[index].session_id} turn {state.turn}: {result.finished.error}"
            )
        record = _record(sessions[index], index, state, result)
        run.records.append(record)
        on_record(record)
        state.so_far = np.concatenate([state.prompt, record.generated])
        expected.add(state.so_far)
        state.turn += 1
        if state.turn < len(sessions[index].turns):
            submit(index)
        if not waiting:
            return
    stuck = ", ".join(f"{sessions[i].session_id} turn {progress[i].turn}" for i in waiting.values())
    raise ClusterError(f"no answer within {_patience(run.config):.0f} s for {stuck}")


def _patience(config: ClusterConfig) -> float:
    """Longer than any engine's own deadlines, so that they get to say what went wrong."""
    return 3 * config.deadline_s + 10


def _record(session: Session, index: int, state: _Progress, result: Result) -> TurnRecord:
    done: Finished = result.finished
    stats = done.stats
    assert stats is not None
    return TurnRecord(
        session_id=session.session_id,
        session=index,
        turn=state.turn,
        request_id=done.request_id,
        prompt=state.prompt,
        generated=unpack_tokens(done.tokens),
        read_path=done.read_path,
        prefill=done.prefill,
        decode=done.decode,
        hit_blocks=stats.hit_blocks,
        expected_hit_blocks=state.expected,
        chunks=stats.chunks,
        pe_bytes=stats.loaded_bytes,
        de_bytes=done.loaded_bytes,
        ttft_s=(stats.first_token_ns - result.submitted_ns) * 1e-9,
        load_s=max(stats.load_s, done.load_s),  # of a split prefix, at the same time
        exposed_s=max(stats.first_token_ns - max(stats.load_end_ns, done.load_end_ns), 0) * 1e-9,
        decode_s=(done.finished_ns - done.decode_begin_ns) * 1e-9,
        stall_s=tuple(stats.stall_s),
        compute_s=tuple(stats.compute_s),
        device_tokens=stats.device_tokens,
        attempts=done.attempts,
        lives=result.lives,
        failures=tuple(done.failures),
        fresh_blocks=tuple(done.fresh_blocks),
        logits=tuple(done.logits),
    )
