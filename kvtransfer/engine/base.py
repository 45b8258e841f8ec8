"""What a prefill and a decode engine have in common: model, memory, traffic manager, sockets."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from abc import ABC, abstractmethod
from typing import Any

import torch
import zmq

from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.messages import (
    Hello,
    Journal,
    LogitsInfo,
    Message,
    Report,
    Shutdown,
    decode_message,
    encode_message,
)
from kvtransfer.engine.storage import ReadRate
from kvtransfer.errors import Mismatch
from kvtransfer.memory import RegionKind, make_pool
from kvtransfer.models import Arena, load_model, namespace_of
from kvtransfer.store import BlockStore
from kvtransfer.transport import TrafficManager, VerbsOptions

__all__ = ["Engine", "describe_logits", "send"]

log = logging.getLogger(__name__)
IDLE_POLL_MS = 200
REPORT_INTERVAL_S = 0.2


def send(socket: zmq.Socket[bytes], message: Message, to: str | None = None) -> None:
    frames = [] if to is None else [to.encode()]
    socket.send_multipart([*frames, encode_message(message)])


def describe_logits(row: torch.Tensor, digest: bool) -> LogitsInfo:
    """Digest (if wanted) and the gap between the two best logits of one float32 row."""
    best = torch.topk(row, 2).values
    text = hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() if digest else ""
    return LogitsInfo(digest=text, gap=float(best[0] - best[1]))


class Engine(ABC):
    """One process, one loop, one device. Subclasses handle messages and do the work in between."""

    kind: str

    def __init__(self, config: ClusterConfig, name: str, num_layer_slots: int, tokens: int) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.name = name
        self.epoch = time.time_ns() ^ os.getpid()
        self.model = load_model(config.model, config.dtype)
        self.runner = self.model.runner()
        self.layout = config.layout
        self.root_key = config.root_key
        if namespace_of(self.model, config.block_tokens).digest() != self.root_key:
            raise Mismatch(
                f"this process's model {config.model} ({self.model.revision}, "
                f"{self.model.layout(config.block_tokens)}) is not the cluster's"
            )
        self.parts = config.read_parts or self.layout.num_layers
        self.store = BlockStore(
            config.store,
            self.root_key,
            self.layout,
            max_bytes=config.store_max_bytes,
            fsync=config.fsync,
        )
        # Only engines that map each other's pools need them shared; others get huge pages for nothing.
        kind = RegionKind.shared if config.transport == "shm" else RegionKind.anonymous
        self.pool = make_pool(self.layout, config.pool_blocks, kind)
        self.arena: Arena = self.model.arena(num_layer_slots or self.model.num_layers, tokens)
        caps = {
            "storage_read": config.storage_read_caps.get(name, config.storage_read_cap),
            "storage_write": config.storage_write_cap,
            "network_read": config.network_cap,
            "network_write": config.network_cap,
        }
        self.traffic = TrafficManager(
            store=self.store,
            pool=self.pool,
            device=self.arena.region,
            layout=self.layout,
            name=name,
            epoch=self.epoch & (2**63 - 1),
            listen=config.listen_address(name),
            transport=config.transport,
            copy=config.copy,
            verbs=VerbsOptions(
                device=config.verbs_device(name), queue_pairs=config.verbs_queue_pairs
            ),
            bytes_per_second={k: v for k, v in caps.items() if v},
            trace=config.trace,
            memory_blocks=config.memory_blocks,
        )
        self.read_rate = ReadRate(self.layout.bytes_per_token)
        self.forwards: list[Any] = []
        self.spans: list[tuple[str, int, int, int]] = []
        self._context = zmq.Context()
        self.scheduler = self._context.socket(zmq.DEALER)
        self.scheduler.setsockopt(zmq.IDENTITY, name.encode())
        self.scheduler.setsockopt(zmq.LINGER, 2000)
        self.scheduler.connect(config.scheduler_address)
        self.poller = zmq.Poller()
        self.poller.register(self.scheduler, zmq.POLLIN)
        self.poller.register(self.traffic.event_fd(), zmq.POLLIN)
        self._running = True
        self._reported: Report | None = None
        self._report_at = 0.0

    # ------------------------------------------------------------------ to be provided

    @abstractmethod
    def handle(self, message: Message, sender: str) -> None: ...

    @abstractmethod
    def work(self) -> bool:
        """One round; True if there is more to do right away."""

    @abstractmethod
    def make_report(self) -> Report: ...

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        self.tell_scheduler(
            Hello(
                engine=self.name,
                kind=self.kind,
                epoch=self.epoch,
                capacity_tokens=self.arena.num_tokens,
            )
        )
        busy = False
        while self._running:
            ready = dict(self.poller.poll(0 if busy else IDLE_POLL_MS))
            self.traffic.drain_events()
            for socket in ready:
                if isinstance(socket, zmq.Socket):
                    self._receive(socket)
            if self._running:
                busy = self.work()
                self._report()
        self._close()

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while self._running:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            sender = frames[0].decode(errors="replace") if len(frames) > 1 else ""
            try:
                message = decode_message(frames[-1])
            except Mismatch as error:
                log.warning("%s: dropped a message: %s", self.name, error)
                continue
            if isinstance(message, Shutdown):
                self._running = False
            else:
                self.handle(message, sender)

    def tell_scheduler(self, message: Message) -> None:
        send(self.scheduler, message)

    def _report(self) -> None:
        self.read_rate.look(self.traffic)
        report = self.make_report()
        now = time.monotonic()
        if report != self._reported or now >= self._report_at:
            self._reported = report
            self._report_at = now + REPORT_INTERVAL_S
            self.tell_scheduler(report)

    def counters(self) -> dict[str, Any]:
        return {
            "traffic": self.traffic.counters(),
            "ring": {name: self.traffic.ring_counters(name) for name in ("kv", "model")},
            "nic": self.traffic.hardware_counters(),
            "store": self.store.stats(),
            "memory_tier": self.traffic.memory_tier_stats(),
            "pool": {
                "slots": self.pool.num_slots,
                "available": self.pool.available,
                "low_watermark": self.pool.low_watermark,
                "bad_releases": self.pool.bad_releases,
            },
            "io_backend": self.traffic.io_backend,
            "arena_tokens": self.arena.num_tokens,
            "arena_peak_tokens": self.arena.peak_tokens,
            "arena_slots": self.arena.num_slots,
        }

    def _close(self) -> None:
        trace = self.traffic.take_trace().tobytes() if self.config.trace else b""
        self.tell_scheduler(
            Journal(
                engine=self.name,
                forwards=self.forwards,
                trace=trace,
                spans=self.spans,
                counters=self.counters(),
            )
        )
        self._context.destroy(linger=2000)
