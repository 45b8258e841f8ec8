"""Interop without pyverbs: clear refusals, and a bridge that believes no pointer."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from kvtransfer import _pyverbs
from kvtransfer.errors import Unsupported
from kvtransfer.memory import MemoryRegion
from kvtransfer.pyverbs import as_memory_region, ring_over

needs_none = pytest.mark.skipif(
    importlib.util.find_spec("pyverbs") is not None, reason="pyverbs is installed"
)


class Base:
    """Lays out like pyverbs' base class: what follows it is the handle."""

    __slots__ = ()


class Holder(Base):
    __slots__ = ("handle",)

    def __init__(self, handle: Any = None) -> None:
        if handle is not None:
            self.handle = handle


@needs_none
def test_without_pyverbs_calls_say_what_to_install() -> None:
    with pytest.raises(Unsupported, match="apt install python3-pyverbs"):
        ring_over(object(), send_depth=8, regions=[], remote=[])
    with pytest.raises(Unsupported, match="apt install python3-pyverbs"):
        as_memory_region(object(), MemoryRegion(4096), 0)


def test_a_closed_object_is_refused() -> None:
    with pytest.raises(ValueError, match="is closed"):
        _pyverbs.queue_pair(Holder(), Base, 17, 2)


def test_memory_that_is_no_queue_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="no queue pair 17"):
        _pyverbs.queue_pair(Holder(bytes(4096)), Base, 17, 2)


@pytest.mark.parametrize("wrong", [object(), "text", Base()])
def test_objects_of_another_class_are_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="is no Base with a handle"):
        _pyverbs.queue_pair(wrong, Base, 1, 2)


def test_a_pointer_into_nowhere_is_an_error_and_no_crash() -> None:
    import ctypes

    instance = Holder(bytes(64))
    slot = ctypes.cast(id(instance) + Base.__basicsize__, ctypes.POINTER(ctypes.c_size_t))
    kept = slot[0]
    try:
        for address in (8, 0x7FFF_FFFF_F000, 0xDEAD_BEEF_0000_0000 >> 1):
            slot[0] = address
            with pytest.raises((ValueError, OverflowError)):
                _pyverbs.queue_pair(instance, Base, 1, 2)
    finally:
        slot[0] = kept
