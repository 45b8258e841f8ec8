"""Interop with pyverbs: post on a queue pair that Python brought up, and show pyverbs our memory.

Needs the package pyverbs (Debian: python3-pyverbs); importing this module works without it, calling
it raises Unsupported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtransfer import _core, _pyverbs
from kvtransfer.errors import InvalidArgument, Unsupported
from kvtransfer.memory import MemoryRegion
from kvtransfer.transport import WorkRing

__all__ = ["as_memory_region", "ring_over"]


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"pyverbs.{name}")
    except ImportError as error:
        raise Unsupported(
            f"interop needs pyverbs ({error}): apt install python3-pyverbs, for the system's Python"
        ) from error


def ring_over(
    queue_pair: Any,
    *,
    send_depth: int,
    regions: Sequence[MemoryRegion],
    remote: Sequence[tuple[int, int, int]],
    batch: int = 32,
) -> WorkRing:
    """A WorkRing that posts on a connected ``pyverbs.qp.QP`` and polls its send completion queue.

    ``send_depth`` is the queue pair's (max_send_wr); one entry is kept for the drain. ``regions``
    are registered with its protection domain and become local regions 0, 1 ...; ``remote`` are the
    peer's as (address, bytes, remote key). Nobody else may post to the queue pair or poll that
    completion queue meanwhile. Raises Unsupported without pyverbs, InvalidArgument for an object
    that isn't a live queue pair.
    """
    base = _import("base").PyverbsCM
    if not isinstance(queue_pair, _import("qp").QP):
        raise InvalidArgument(f"ring_over needs a pyverbs.qp.QP, got {type(queue_pair).__name__}")
    try:
        address = _pyverbs.queue_pair(queue_pair, base, queue_pair.qp_num, queue_pair.qp_type)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"ring_over: {error}") from error
    return _core.adopt_queue_pair(address, send_depth, regions, remote, batch, queue_pair)


def as_memory_region(protection_domain: Any, region: MemoryRegion, access: int) -> Any:
    """A ``pyverbs.mr.MR`` over our region's bytes, so that pyverbs can post from and into them.

    ``access`` are pyverbs' IBV_ACCESS_* flags. The region must outlive it.
    """
    address = region.array().ctypes.data
    return _import("mr").MR(protection_domain, region.num_bytes, access, address=address)
