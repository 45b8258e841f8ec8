"""What the scheduler is told and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["Assignment", "EngineReport", "Limits", "ReadPath", "Request"]

ReadPath = Literal["pe", "de"]


@dataclass(frozen=True)
class Request:
    """One turn. ``num_tokens`` is the whole context, ``cached_tokens`` the part expected in the
    store, ``num_generate`` what decode will add."""

    request_id: int
    num_tokens: int
    cached_tokens: int = 0
    num_generate: int = 0


@dataclass(frozen=True)
class EngineReport:
    """An engine's state as of its last message: seq_e, tok_e, and read_q of its node (paper 6.1).

    ``free_tokens`` is a decode engine's free HBM in tokens; prefill engines leave it 0.
    """

    engine: str
    group: str
    node: str
    unfinished_requests: int = 0
    unfinished_tokens: int = 0
    read_queue_tokens: int = 0
    free_tokens: int = 0

    def with_request(self, request: Request) -> EngineReport:
        """The report as it will read once the engine has taken ``request``."""
        return replace(
            self,
            unfinished_requests=self.unfinished_requests + 1,
            unfinished_tokens=self.unfinished_tokens + request.num_tokens,
            free_tokens=self.free_tokens - request.num_tokens - request.num_generate,
        )


@dataclass(frozen=True)
class Limits:
    """alpha: tokens readable from storage in 3 s; beta: tokens one engine processes in 5 s (both
    profiled; `kvtransfer profile` measures them)."""

    alpha: int
    beta: int


@dataclass(frozen=True)
class Assignment:
    """A request's engines and the side that reads its hit tokens."""

    request: Request
    prefill: str
    decode: str
    read_path: ReadPath
