"""ClusterConfig: everything the processes of one cluster agree on; travels as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvtransfer.errors import InvalidArgument
from kvtransfer.layout import BlockLayout
from kvtransfer.scheduler import AttentionTimeModel, Balance

__all__ = ["ClusterConfig"]


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are in tokens, blocks or bytes per second as named; 0 bytes per second is no cap."""

    name: str
    model: str = "tiny"
    dtype: Literal["float32", "bfloat16"] = "float32"
    block_tokens: int = 64
    namespace: str  # hex digest; an engine that computes another one refuses to start
    layer_planes: list[list[int]]  # bytes per token of each plane of each layer
    store: str
    store_max_bytes: int = 0
    fsync: bool = False
    num_prefill: int = 1
    num_decode: int = 1
    path: Literal["pe", "de", "auto", "split"] = "auto"
    balance: Balance = "paper"  # others: for comparison, or `aware`
    transport: Literal["shm", "verbs"] = "shm"
    copy: Literal["cpu", "nic"] = "cpu"  # of staged layers; nic needs verbs
    verbs_devices: list[str] = []  # handed to the engines in turn; none: the first active one
    verbs_queue_pairs: int = 1  # per peer and traffic class
    pool_blocks: int = 256
    prefill_tokens: int = 8192  # of each of the three layer slots on a PE
    decode_tokens: int = 32768  # of a DE's device cache
    memory_blocks: int = 0  # of each engine's memory tier in front of the store; 0: none
    read_parts: int = 0  # storage reads per block; 0: one per layer; 1: the paper's Full Block
    storage_read_cap: int = 0
    storage_read_caps: dict[str, int] = {}  # of single engines, in its place
    storage_write_cap: int = 0
    network_cap: int = 0
    quota_s: float = 0.3
    time_fixed_s: float = 2e-3
    time_per_token_s: float = 1e-4
    time_per_pair_s: float = 1e-8
    alpha: int = 1 << 20
    beta: int = 1 << 20
    deadline_s: float = 120.0
    max_attempts: int = 4
    layerwise: bool = True
    trace: bool = False
    journal: bool = False

    def __post_init__(self) -> None:
        bounds = {
            "block_tokens": (1, 1 << 16),
            "num_prefill": (1, 64),
            "num_decode": (1, 64),
            "pool_blocks": (1, 1 << 24),
            "memory_blocks": (0, 1 << 24),
            "prefill_tokens": (1, 1 << 26),
            "decode_tokens": (1, 1 << 26),
            "read_parts": (0, 1 << 10),
            "max_attempts": (1, 100),
            "verbs_queue_pairs": (1, 16),
        }
        for field, (low, high) in bounds.items():
            value = getattr(self, field)
            if not low <= value <= high:
                raise InvalidArgument(f"{field} must be {low}..{high}, got {value}")
        if len(self.namespace) != 64:
            raise InvalidArgument("namespace must be the hex of a 32-byte digest")
        if self.copy == "nic" and self.transport != "verbs":
            raise InvalidArgument("copy=nic needs transport=verbs")
        if self.deadline_s <= 0 or self.quota_s <= 0:
            raise InvalidArgument("deadline_s and quota_s must be positive")

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout.per_layer(self.block_tokens, self.layer_planes)

    @property
    def root_key(self) -> bytes:
        """The namespace digest: the parent of every chain's first block."""
        return bytes.fromhex(self.namespace)

    # Abstract socket names: nothing of them is left in a file system.
    @property
    def scheduler_address(self) -> str:
        return f"ipc://@{self.name}/scheduler"

    def control_address(self, engine: str) -> str:
        return f"ipc://@{self.name}/{engine}"

    def listen_address(self, engine: str) -> str:
        return f"{self.name}/{engine}/link"

    def verbs_device(self, engine: str) -> str:
        """The engine's own compute NIC; empty: the first with an active port."""
        if not self.verbs_devices:
            return ""
        order = self.prefill_engines + self.decode_engines
        return self.verbs_devices[order.index(engine) % len(self.verbs_devices)]

    @property
    def prefill_engines(self) -> list[str]:
        return [f"pe{i}" for i in range(self.num_prefill)]

    @property
    def decode_engines(self) -> list[str]:
        return [f"de{i}" for i in range(self.num_decode)]

    @property
    def attention_time(self) -> AttentionTimeModel:
        return AttentionTimeModel(self.time_fixed_s, self.time_per_token_s, self.time_per_pair_s)
