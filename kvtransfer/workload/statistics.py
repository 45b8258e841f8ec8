"""What a workload looks like, in the terms of the paper's Table 2."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtransfer.workload.traces import TraceSession

__all__ = ["WorkloadStats", "describe"]


@dataclass(frozen=True)
class WorkloadStats:
    """Token counts; ``append`` and ``context`` are means over requests, ``hit_rate`` the share of
    input tokens whose block was in an earlier prompt (of the session, or of any for global ids)."""

    sessions: int
    requests: int
    turns_per_session: float
    append_tokens: float
    generated_tokens: float
    total_tokens: float
    context_tokens: float
    max_context_tokens: int
    hit_rate: float


def describe(sessions: Iterable[TraceSession]) -> WorkloadStats:
    """Streams over the sessions; memory is one session's block ids (all ids for global ones)."""
    num_sessions = requests = inputs = outputs = hits = totals = longest = 0
    shared: set[int] = set()
    for session in sessions:
        num_sessions += 1
        known = shared if session.global_ids else set()
        for turn in session.turns:
            requests += 1
            inputs += turn.input_tokens
            outputs += turn.output_tokens
            longest = max(longest, turn.input_tokens)
            ids = turn.block_ids.tolist()
            hit = next((i for i, block in enumerate(ids) if block not in known), len(ids))
            hits += hit * session.block_tokens
            known.update(ids)
        if session.turns:
            totals += session.turns[-1].input_tokens + session.turns[-1].output_tokens
    per_request = 1 / max(requests, 1)
    return WorkloadStats(
        sessions=num_sessions,
        requests=requests,
        turns_per_session=requests / max(num_sessions, 1),
        append_tokens=(inputs - hits) * per_request,
        generated_tokens=outputs * per_request,
        total_tokens=totals / max(num_sessions, 1),
        context_tokens=inputs * per_request,
        max_context_tokens=longest,
        hit_rate=hits / max(inputs, 1),
    )
