"""The paper's results (arXiv 2602.21548 v2), and what has to be simulated for each.

Seconds read off its figures carry 2-5 % of reading error. ``FITTED`` marks the points the free
parameters were fitted on; everything else follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.sim import Agents, SimConfig

__all__ = ["ABLATION", "BALANCE", "EQUALITIES", "OFFLINE", "ONLINE", "SCALE", "Online", "Point"]


@dataclass(frozen=True)
class Point:
    """One job completion time in seconds."""

    name: str
    paper: float
    config: SimConfig
    fitted: bool = False


def _config(
    model: str, nodes: tuple[int, int], mal: str, count: int, mode: str, *, rate: float = 0.0
) -> SimConfig:
    agents = Agents(workload=mal, count=count, rate=rate)
    return SimConfig(model=model, prefill=nodes[0], decode=nodes[1], mode=mode, agents=agents)


# Oracle, dual path, basic.
_TABLES = {
    ("ds-27b", (1, 1), "32k"): {
        512: (380, 410, 510),
        1024: (450, 670, 990),
        2048: (720, 1110, 1860),
        4096: (1300, 2110, 3560),
    },
    ("ds-27b", (1, 1), "48k"): {
        512: (600, 760, 1210),
        1024: (740, 1330, 2150),
        2048: (1230, 2250, 4020),
        4096: (3120, 4800, 7290),
    },
    ("ds-27b", (1, 1), "64k"): {
        512: (830, 1260, 2170),
        1024: (1420, 2370, 4110),
        2048: (2370, 4470, 7870),
        4096: (5220, 9450, 16700),
    },
    ("deepseek-v3.2", (2, 4), "32k"): {
        512: (860, 860, 960),
        1024: (1080, 1080, 1500),
        2048: (1660, 1620, 2520),
        4096: (2980, 2860, 4660),
    },
    ("deepseek-v3.2", (2, 4), "64k"): {
        512: (1930, 2030, 2860),
        1024: (2660, 2920, 5360),
        2048: (4900, 5360, 10050),
        4096: (9320, 10310, 19280),
    },
    ("qwen2.5-32b", (1, 2), "32k"): {
        128: (510, 730, 1030),
        256: (760, 1240, 2030),
        512: (1160, 1780, 3790),
    },
}
_MODES = ("oracle", "dualpath", "basic")


def _name(model: str, nodes: tuple[int, int], mal: str, count: int, mode: str) -> str:
    return f"{model} {nodes[0]}P{nodes[1]}D {mal} {count} {mode}"


OFFLINE = [
    Point(
        _name(model, nodes, mal, count, mode),
        seconds,
        _config(model, nodes, mal, count, mode),
        fitted=model == "ds-27b" and mal == "64k",
    )
    for (model, nodes, mal), rows in _TABLES.items()
    for count, values in rows.items()
    for mode, seconds in zip(_MODES, values, strict=True)
] + [
    # DS-27B, 64K, 2048 agents at other ratios.
    Point(
        _name("ds-27b", nodes, "64k", 2048, mode),
        seconds,
        _config("ds-27b", nodes, "64k", 2048, mode),
    )
    for nodes, mode, seconds in (
        ((2, 1), "dualpath", 3300),
        ((1, 2), "dualpath", 3400),
        ((2, 1), "basic", 4250),
        ((1, 2), "basic", 8300),
    )
]


def _27b(nodes: tuple[int, int], mode: str) -> str:
    return _name("ds-27b", nodes, "64k", 2048, mode)


# Job completion follows the number of usable storage NICs.
EQUALITIES = [
    (_27b((1, 1), "basic"), _27b((1, 2), "basic")),
    (_27b((1, 1), "dualpath"), _27b((2, 1), "basic")),
    (_27b((2, 1), "dualpath"), _27b((1, 2), "dualpath")),
]

# 660B, 64K: how much shorter than Basic, in percent, cumulative.
ABLATION = [
    (mode, percent, _config("deepseek-v3.2", (2, 4), "64k", 1024, mode))
    for mode, percent in (("layerwise", 17.2), ("round_robin", 38.2), ("dualpath", 45.6))
]


@dataclass(frozen=True)
class Online:
    """Agents per second within TTFT 4 s and TPOT 50 ms."""

    name: str
    model: str
    nodes: tuple[int, int]
    dual_path: float
    basic: float


ONLINE = [
    Online("ds-27b 1P1D", "ds-27b", (1, 1), 0.5, 0.3),
    Online("deepseek-v3.2 2P4D", "deepseek-v3.2", (2, 4), 0.45, 0.2),
]

# Storage NICs, largest over mean: round robin and the paper's policy.
BALANCE = [("round_robin", 1.53), ("dualpath", 1.18)]

SCALE = [
    Point(
        "deepseek-v3.2 2P4D 48k 2000 dualpath",
        3167,
        _config("deepseek-v3.2", (2, 4), "48k", 2000, "dualpath"),
    ),
    Point(
        "deepseek-v3.2 48P96D 48k 48000 dualpath",
        3201,
        _config("deepseek-v3.2", (48, 96), "48k", 48000, "dualpath"),
    ),
]
