"""The simulated cluster: agents, the scheduler the live engines have, and the engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtransfer.errors import InvalidArgument
from kvtransfer.scheduler import Assignment, Limits, Request, Scheduler
from kvtransfer.sim.agents import Script, arrivals, scripts
from kvtransfer.sim.config import SimConfig
from kvtransfer.sim.decode import DecodeGpu
from kvtransfer.sim.kernel import Kernel
from kvtransfer.sim.node import Gpu, Node
from kvtransfer.sim.prefill import PrefillGpu, prefill_time_model
from kvtransfer.sim.turn import Turn

if TYPE_CHECKING:
    from kvtransfer.sim.results import Recorder

__all__ = ["SimCluster", "paper_limits"]


def paper_limits(config: SimConfig, work: list[Script]) -> Limits:
    """alpha: tokens readable in 3 s; beta: tokens (context and all) a GPU gets through in 5 s."""
    hardware = config.hardware
    rate = (
        hardware.snic_bytes_per_s * hardware.storage_efficiency / config.cost.stored_bytes_per_token
    )
    hits = sum(sum(s.hit) for s in work)
    new = sum(sum(s.new) for s in work)
    turns = sum(len(s) for s in work)
    model = prefill_time_model(config)
    seconds = model.increment(hits // turns, max(new // turns, 1))
    return Limits(int(3 * rate), int(5 * (hits + new) / turns / seconds))


class SimCluster:
    """Runs one configuration; ``recorder`` is told of every finished turn. ``work`` takes the place of
    the configured workload."""

    def __init__(
        self, config: SimConfig, recorder: Recorder, work: list[Script] | None = None
    ) -> None:
        self.config, self.recorder = config, recorder
        self.kernel = Kernel()
        self.scripts = work or scripts(config.agents, config.block_tokens)
        if not self.scripts:
            raise InvalidArgument(f"{config.agents.workload}: no agents with turns")
        how, stored = config.how, config.cost.stored_bytes_per_token
        self.scheduler = Scheduler(
            paper_limits(config, self.scripts),
            how.path,
            block_tokens=config.block_tokens,
            balance=how.balance,
            network_tokens_per_s=config.hardware.cnic_bytes_per_s / stored,
            memory_tokens_per_s=config.hardware.dram_bytes_per_s / stored,
        )
        self.prefill: dict[str, PrefillGpu] = {}
        self.decode: dict[str, DecodeGpu] = {}
        self.nodes: list[Node] = []
        for kind, count in (("pe", config.prefill), ("de", config.decode)):
            for number in range(count):
                self._add_node(kind, number)
        self._turns: dict[int, Turn] = {}
        self._next_id = 0
        self._fetch_at = -1.0
        self.active_agents = self.begun_agents = 0

    def _add_node(self, kind: str, number: int) -> None:
        config = self.config
        node = Node(
            self.kernel, f"{kind}{number}", config.hardware, config.cost.stored_bytes_per_token
        )
        self.nodes.append(node)
        for index in range(config.hardware.gpus_per_node):
            name = f"{kind}{number}.{index}"
            if kind == "pe":
                pe = self.prefill[name] = PrefillGpu(node, name, config)
                pe.on_loaded, pe.on_first_token = self._loaded, self._first_token
                self.scheduler.add_prefill(pe.report()[0])
            else:
                de = self.decode[name] = DecodeGpu(node, name, config)
                de.on_loaded, de.on_done = self._loaded, self._done
                self.scheduler.add_decode(de.report()[0])

    # ------------------------------------------------------------------ agents

    def run(self, until: float = math.inf, progress: Callable[[], None] | None = None) -> None:
        """All agents, to their end or to ``until``."""
        starts = arrivals(self.config.agents)
        for agent, start in enumerate(starts):
            self.kernel.at(start, self._begin, agent)
        self._progress = progress
        self.kernel.run(until)

    def _begin(self, agent: int) -> None:
        self.active_agents += 1
        self.begun_agents += 1
        self._submit(agent, 0)

    def _submit(self, agent: int, index: int) -> None:
        script = self.scripts[agent % len(self.scripts)]
        hit, new, generate = script.hit[index], script.new[index], script.generate[index]
        self._next_id += 1
        request = Request(self._next_id, hit + new, hit, generate, agent)
        self._turns[self._next_id] = Turn(
            agent, index, request, hit, new, generate, self.kernel.now
        )
        self.scheduler.submit(request)
        self._want_fetch()

    def _next_turn(self, turn: Turn) -> None:
        script = self.scripts[turn.agent % len(self.scripts)]
        index = turn.index + 1
        if index == len(script):
            self.active_agents -= 1
            return
        pause = script.think[index] + self.config.hardware.turn_overhead_s
        self.kernel.after(pause, self._submit, turn.agent, index)

    # ------------------------------------------------------------------ the scheduler

    def _want_fetch(self) -> None:
        """Engines fetch at the ends of a period; one fetch does for all that came within it."""
        now, period = self.kernel.now, self.config.fetch_period_s
        if self._fetch_at < now:
            self._fetch_at = (math.floor(now / period) + 1) * period
            self.kernel.at(self._fetch_at, self._fetch)

    def _fetch(self) -> None:
        self._fetch_at = -1.0
        for assignment in self.scheduler.fetch(self.kernel.now):
            self._assign(assignment)

    def _report(self, gpu: Gpu) -> None:
        self.scheduler.report(*gpu.report())
        if self.scheduler.waiting:
            self._want_fetch()

    def _assign(self, assignment: Assignment) -> None:
        turn = self._turns[assignment.request.request_id]
        prefill = turn.prefill = self.prefill[assignment.prefill]
        decode = turn.decode = self.decode[assignment.decode]
        turn.assigned = self.kernel.now
        turn.decode_tokens = assignment.decode_tokens
        for gpu in (prefill, decode):
            gpu.unfinished_requests += 1
            gpu.unfinished_tokens += turn.request.num_tokens
            gpu.unreported.append(turn.request.request_id)
        decode.free_tokens -= turn.request.peak_tokens
        if self.config.how.free_io:
            turn.decode_tokens = turn.hit  # no buffers are in it
            turn.loaded = self.kernel.now
            prefill.add(turn)
            return
        prefill.node.queued_tokens += turn.own_tokens
        decode.node.queued_tokens += turn.decode_tokens
        self._pass_prefill(turn, 1)
        self._pass_decode(turn, 1)
        decode.node.reserve(turn.context, self._admitted, turn)

    @staticmethod
    def _pass_prefill(turn: Turn, sign: int) -> None:
        """What a turn has to read through the PE's NIC and its memory (equations 1 and 8)."""
        turn.prefill.network_tokens += sign * 2 * turn.own_tokens
        turn.prefill.node.memory_tokens += sign * 2 * turn.own_tokens

    @staticmethod
    def _pass_decode(turn: Turn, sign: int) -> None:
        """Through the DE's (equations 4 and 8)."""
        turn.decode.network_tokens += sign * turn.decode_tokens
        turn.decode.node.memory_tokens += sign * (2 * turn.context + turn.decode_tokens)

    def _admitted(self, turn: Turn) -> None:
        """The DE buffer is reserved."""
        own = turn.own_tokens
        turn.loads = (own > 0) + (turn.decode_tokens > 0)
        if turn.loads == 0:
            self._all_loaded(turn)
            return
        if turn.decode_tokens:
            turn.decode.load(turn, turn.decode_tokens)
        if own:
            turn.prefill.node.reserve(own, self._load_own, turn)

    def _load_own(self, turn: Turn) -> None:
        turn.prefill.load(turn, turn.own_tokens)

    def _loaded(self, gpu: Gpu, turn: Turn) -> None:
        self._report(gpu)  # its disk's queue is shorter
        turn.loads -= 1
        if turn.loads == 0:
            self._all_loaded(turn)

    def _all_loaded(self, turn: Turn) -> None:
        turn.loaded = self.kernel.now
        turn.prefill.add(turn)

    def _first_token(self, turn: Turn) -> None:
        turn.first_token = self.kernel.now
        decode = turn.decode
        if self.config.how.free_io:
            self._report(turn.prefill)
            self._landed(turn)
            return
        self._pass_prefill(turn, -1)
        self._report(turn.prefill)
        self.kernel.flow(
            turn.context * decode.node.kv_bytes,
            [(decode.cnic_read, 1.0), (decode.cnic_write, 1.0), (decode.node.dram, 1.0)],
            self._landed,
            turn,
        )

    def _landed(self, turn: Turn) -> None:
        turn.landed = self.kernel.now
        if not self.config.how.free_io:
            self._pass_decode(turn, -1)
            turn.decode.node.release(turn.context)
        turn.decode.add(turn)

    def _done(self, turn: Turn) -> None:
        turn.done = self.kernel.now
        decode = turn.decode
        decode.unfinished_requests -= 1
        decode.unfinished_tokens -= turn.request.num_tokens
        decode.free_tokens += turn.request.peak_tokens
        del self._turns[turn.request.request_id]
        self.scheduler.finish(turn.request.request_id)
        self._report(decode)
        self.recorder.add(turn)
        if self._progress is not None:
            self._progress()
        self._next_turn(turn)
