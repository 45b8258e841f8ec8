"""One turn of an agent on its way through the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransfer.scheduler import Request
    from kvtransfer.sim.decode import DecodeGpu
    from kvtransfer.sim.prefill import PrefillGpu

__all__ = ["Turn"]


class Turn:
    """Times are of the simulation's clock; tokens as in :class:`~kvtransfer.sim.agents.Script`."""

    __slots__ = (
        "agent",
        "assigned",
        "computed",
        "decode",
        "decode_tokens",
        "done",
        "first_token",
        "generate",
        "hit",
        "index",
        "landed",
        "loaded",
        "loads",
        "new",
        "prefill",
        "prefill_begin",
        "request",
        "submitted",
    )

    def __init__(
        self,
        agent: int,
        index: int,
        request: Request,
        hit: int,
        new: int,
        generate: int,
        now: float,
    ) -> None:
        self.agent, self.index, self.request = agent, index, request
        self.hit, self.new, self.generate = hit, new, generate
        self.decode_tokens = 0  # of the hit: what the DE loads
        self.computed = hit  # tokens whose KV is there or under way
        self.loads = 0  # storage reads under way
        self.submitted = now
        self.assigned = self.loaded = self.prefill_begin = 0.0
        self.first_token = self.landed = self.done = 0.0
        self.prefill: PrefillGpu
        self.decode: DecodeGpu

    @property
    def own_tokens(self) -> int:
        """Of the hit: what the PE loads."""
        return self.hit - self.decode_tokens

    @property
    def context(self) -> int:
        """Tokens of the prompt."""
        return self.hit + self.new
