"""The picture of ``kvtransfer plan cluster``: every resource's load against P/D."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.errors import ModelError

if TYPE_CHECKING:
    from kvtransfer.analysis import ClusterShape

__all__ = ["plot_loads"]


def plot_loads(shape: ClusterShape, here: float, target: Path) -> None:
    """Loads as shares of their resource with full storage NICs; the feasible range is shaded and
    ``here``, the P/D asked for, is marked. Raises ModelError without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ModelError(
            f"--plot needs matplotlib: pip install 'kvtransfer[plot]' ({error})"
        ) from error
    from kvtransfer.analysis import loads, ratio_range

    ratios = np.geomspace(min(1 / 10, here / 2), max(10, here * 2), 200)
    rows = [loads(shape, float(ratio), 1).shares(shape) for ratio in ratios]
    figure, axes = plt.subplots(figsize=(9, 5))
    for style, name in zip(("-", "--", "-", "--", ":", "-."), rows[0], strict=True):
        axes.plot(ratios, [row[name] for row in rows], style, label=name, linewidth=2)
    found = ratio_range(shape)
    if found.feasible:
        label = f"only storage limits: {found.lower:.2f} to {found.upper:.2f}"
        axes.axvspan(found.lower, found.upper, color="#228833", alpha=0.12, label=label)
    axes.axhline(1, color="#333333", linewidth=1)
    axes.axvline(here, color="#ee6677", linewidth=1.5, label=f"here: {here:.2f}")
    axes.set_xscale("log")
    ticks = [0.1, 0.25, 0.5, 1, 2, 4, 10]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(0, 2)
    axes.set_xlabel("prefill nodes / decode nodes")
    axes.set_ylabel("share of the resource, storage NICs full")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", fontsize=9)
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    plt.close(figure)
