"""Prefill GPUs: batches under the compute quota, layers streamed in and out while they compute."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from kvtransfer.scheduler import AttentionTimeModel, BatchItem, PrefillWork, form_batch
from kvtransfer.sim.config import SimConfig, weights_per_gpu
from kvtransfer.sim.node import Gpu, Node
from kvtransfer.sim.turn import Turn

__all__ = ["PrefillGpu", "prefill_time_model"]

MOST_LOOKED_AT = 64  # requests a batch is formed from


def prefill_time_model(config: SimConfig) -> AttentionTimeModel:
    """Seconds of a forward on one GPU, over all layers, from the model's FLOPs."""
    cost, hardware = config.cost, config.hardware
    speed = hardware.gpu_flops_per_s * hardware.prefill_utilisation
    per_token = cost.flops_per_token + cost.flops_per_selected * cost.selected_tokens
    fixed = hardware.forward_overhead_s
    return AttentionTimeModel(fixed, per_token / speed, cost.flops_per_pair / speed)


def _work(turn: Turn) -> PrefillWork:
    return PrefillWork(turn.request.request_id, turn.computed, turn.context - turn.computed)


class PrefillGpu(Gpu):
    """One forward at a time. With layer-wise prefill a batch takes as long as its computation or its
    transfers, whichever is longer, and needs device memory for a few layers; without it all KV is
    brought in first and stays."""

    def __init__(self, node: Node, name: str, config: SimConfig) -> None:
        super().__init__(node, name, config.hardware)
        self.config = config
        self.model = prefill_time_model(config)
        hardware = config.hardware
        weights = weights_per_gpu(config, config.prefill)
        free = hardware.hbm_bytes * (1 - hardware.hbm_reserve) - weights
        tokens = free / node.kv_bytes
        self.most_tokens = int(tokens * (config.cost.layers / 3 if config.how.layerwise else 1))
        self.ready: OrderedDict[int, Turn] = OrderedDict()
        self.on_first_token: Callable[[Turn], None]
        self.busy_s = 0.0
        self._overlaps = config.how.layerwise or config.how.free_io
        self._batch: list[tuple[Turn, BatchItem]] = []
        self._pending = 0  # transfers of the batch, and its computation where it overlaps them
        self._compute_s = 0.0

    def add(self, turn: Turn) -> None:
        """Its prefix is in the buffers."""
        self.ready[turn.request.request_id] = turn
        if not self._batch:
            self._start()

    def _start(self) -> None:
        work = map(_work, islice(self.ready.values(), MOST_LOOKED_AT))
        items = form_batch(work, self.model, self.config.quota_s, self.most_tokens)
        if not items and self.ready:  # more than the device holds: alone, with nothing else
            first = _work(next(iter(self.ready.values())))
            items = [BatchItem(first.request_id, first.cached, first.remaining)]
        now = self.kernel.now
        seconds = self.model.fixed_s
        for item in items:
            turn = self.ready[item.request_id]
            self._batch.append((turn, item))
            turn.prefill_begin = turn.prefill_begin or now
            seconds += self.model.increment(item.cached, item.new)
        if not items:
            return
        self._compute_s = seconds
        self.busy_s += seconds
        if not self.config.how.free_io:
            for turn, item in self._batch:
                self._transfer(turn, item)
        if self._overlaps:
            self._pending += 1
            self.kernel.after(seconds, self._part_done)

    def _transfer(self, turn: Turn, item: BatchItem) -> None:
        """What a chunk brings to the device and sends to the DE buffer, layer by layer."""
        decode, kv = turn.decode, self.node.kv_bytes
        from_decode = turn.decode_tokens + max(item.cached - turn.hit, 0)
        from_own = item.cached - from_decode
        if from_own:
            # In from our buffer; and out to the DE's with the first chunk, the new tokens after them.
            out = item.new / from_own + (item.cached == turn.hit)
            uses = [(self.cnic_read, 1.0 + out), (self.cnic_write, 1.0), (self.node.dram, 1.0)]
            uses += [(decode.cnic_write, out), (decode.node.dram, out)]
            self._flow(from_own * kv, uses)
        if from_decode:
            out = 0.0 if from_own else item.new / from_decode
            uses = [(decode.cnic_read, 1.0), (decode.node.dram, 1.0 + out), (self.cnic_write, 1.0)]
            if out:
                uses += [(self.cnic_read, out), (decode.cnic_write, out)]
            self._flow(from_decode * kv, uses)
        if not item.cached:
            uses = [(self.cnic_read, 1.0), (decode.cnic_write, 1.0), (decode.node.dram, 1.0)]
            self._flow(item.new * kv, uses)

    def _flow(self, size: float, uses: list[tuple[int, float]]) -> None:
        self._pending += 1
        self.kernel.flow(size, uses, self._part_done)

    def _part_done(self) -> None:
        self._pending -= 1
        if self._pending > 0:
            return
        if self._overlaps:
            self._finish()
        else:  # everything is in: now it computes
            self.kernel.after(self._compute_s, self._finish)

    def _finish(self) -> None:
        batch, self._batch = self._batch, []
        for turn, item in batch:
            turn.computed = item.cached + item.new
            if turn.computed == turn.context:
                del self.ready[item.request_id]
                self.unfinished_requests -= 1
                self.unfinished_tokens -= turn.request.num_tokens
                if turn.own_tokens:
                    self.node.release(turn.own_tokens)
                self.on_first_token(turn)
        if self.ready and not self._batch:
            self._start()
