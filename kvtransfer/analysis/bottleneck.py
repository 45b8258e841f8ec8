"""Which loads a P/D ratio puts on every resource, and which ratios no resource but storage limits.

The closed formulas of DualPath (arXiv 2602.21548, section 4.2). Symbols: P prefill and D decode
nodes, g GPUs and as many compute NICs (CNICs) per node, B the bandwidth of one CNIC, s * B the storage
bandwidth of a node, M its DRAM bandwidth (half duplex: reads and writes share it). Every storage NIC
is read at full speed; then a pair of a prefill and a decode GPU carries T_p over the PE read path and
T_c over the DE read path. The paper counts neither the return of miss tokens nor decode's persisting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from kvtransfer.errors import InvalidArgument

__all__ = ["ClusterShape", "Loads", "RatioRange", "loads", "pair_rates", "ratio_range"]


@dataclass(frozen=True)
class ClusterShape:
    """A node's hardware. ``cnic_bytes_per_s`` is B, one direction; ``storage_bytes_per_s`` is s * B,
    the storage bandwidth of a node; ``dram_bytes_per_s`` is M."""

    gpus_per_node: int
    cnic_bytes_per_s: float
    storage_bytes_per_s: float
    dram_bytes_per_s: float

    def __post_init__(self) -> None:
        rates = (self.cnic_bytes_per_s, self.storage_bytes_per_s, self.dram_bytes_per_s)
        if self.gpus_per_node < 1 or not all(0 < rate < math.inf for rate in rates):
            raise InvalidArgument(f"GPUs per node and bandwidths must be positive, got {self}")

    @property
    def s(self) -> float:
        """Storage bandwidth of a node in units of one CNIC."""
        return self.storage_bytes_per_s / self.cnic_bytes_per_s


def pair_rates(shape: ClusterShape, prefill: float, decode: float) -> tuple[float, float]:
    """(T_p, T_c) in bytes/s: what one GPU pair carries over the PE and over the DE read path."""
    _check_nodes(prefill, decode)
    per_gpu = shape.storage_bytes_per_s / shape.gpus_per_node**2
    return per_gpu / decode, per_gpu / prefill


@dataclass(frozen=True)
class Loads:
    """Bytes/s with every storage NIC at full speed: CNICs per GPU and direction, DRAM per node.

    "Read" is what a CNIC fetches from host memory, "write" what it puts into host or device memory.
    """

    pe_cnic_read: float
    pe_cnic_write: float
    de_cnic_read: float
    de_cnic_write: float
    pe_dram: float
    de_dram: float

    def shares(self, shape: ClusterShape) -> dict[str, float]:
        """Each load as a fraction of what its resource can do; above 1 it binds."""
        cnic, dram = shape.cnic_bytes_per_s, shape.dram_bytes_per_s
        return {
            "PE CNIC read": self.pe_cnic_read / cnic,
            "PE CNIC write": self.pe_cnic_write / cnic,
            "DE CNIC read": self.de_cnic_read / cnic,
            "DE CNIC write": self.de_cnic_write / cnic,
            "PE DRAM": self.pe_dram / dram,
            "DE DRAM": self.de_dram / dram,
        }

    def binding(self, shape: ClusterShape) -> tuple[str, float]:
        """The most loaded resource and its share; the storage NICs themselves have share 1."""
        name, share = max(self.shares(shape).items(), key=lambda item: item[1])
        return (name, share) if share > 1 else ("storage NICs", 1.0)


def loads(shape: ClusterShape, prefill: float, decode: float, *, de_path: bool = True) -> Loads:
    """Equations 1, 2, 4, 6 and 8 at P ``prefill`` and D ``decode`` nodes; without ``de_path`` only the
    prefill nodes' storage NICs are read."""
    rate_p, rate_c = pair_rates(shape, prefill, decode)
    if not de_path:
        rate_c = 0.0
    g = shape.gpus_per_node
    pairs_of_pe, pairs_of_de = decode * g, prefill * g
    ratio = prefill / decode
    return Loads(
        pe_cnic_read=2 * rate_p * pairs_of_pe,  # (1)
        pe_cnic_write=(rate_p + rate_c) * pairs_of_pe,  # (2)
        de_cnic_read=(rate_p + 2 * rate_c) * pairs_of_de,  # (4)
        de_cnic_write=(2 * rate_p + rate_c) * pairs_of_de,  # (6)
        pe_dram=2 * shape.storage_bytes_per_s,
        de_dram=((3 if de_path else 0) + 2 * ratio) * shape.storage_bytes_per_s,  # (8)
    )


@dataclass(frozen=True)
class RatioRange:
    """Feasible P/D (equation 9): ``lower`` <= P/D <= ``upper``, with what sets either end.

    Empty when ``lower > upper``, or when equation 1 fails, which no ratio can mend (``storage_fits``
    False: a node's storage is faster than half of its CNICs).
    """

    lower: float
    upper: float
    lower_by: str
    upper_by: str
    storage_fits: bool

    @property
    def feasible(self) -> bool:
        return self.storage_fits and self.lower <= self.upper

    def contains(self, prefill: float, decode: float) -> bool:
        return self.feasible and self.lower <= prefill / decode <= self.upper

    def ratios(self, most_nodes: int) -> list[tuple[int, int]]:
        """(P, D) of at most ``most_nodes`` nodes together within the range, in lowest terms."""
        found = {
            Fraction(p, d)
            for p in range(1, most_nodes)
            for d in range(1, most_nodes - p + 1)
            if self.contains(p, d)
        }
        return [(ratio.numerator, ratio.denominator) for ratio in sorted(found)]


def ratio_range(shape: ClusterShape) -> RatioRange:
    """Equations 3, 5, 7, 8 and 9."""
    g, s = shape.gpus_per_node, shape.s
    lower = s / (g - s) if s < g else math.inf  # (3)
    uppers = {
        "DE CNIC read": (g - 2 * s) / s,  # (5)
        "DE CNIC write": (g - s) / (2 * s),  # (7)
        "DE DRAM": (shape.dram_bytes_per_s / shape.storage_bytes_per_s - 3) / 2,  # (8)
    }
    upper_by = min(uppers, key=lambda name: uppers[name])
    return RatioRange(
        lower=lower,
        upper=uppers[upper_by],
        lower_by="PE CNIC write",
        upper_by=upper_by,
        storage_fits=2 * s <= g and 2 * shape.storage_bytes_per_s <= shape.dram_bytes_per_s,
    )


def _check_nodes(prefill: float, decode: float) -> None:
    if not (0 < prefill < math.inf and 0 < decode < math.inf):
        raise InvalidArgument(f"needs prefill and decode nodes, got {prefill}P{decode}D")
