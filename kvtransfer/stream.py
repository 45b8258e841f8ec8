"""The per-layer fence between transfers and a forward pass."""

from kvtransfer._core import LayerStream

__all__ = ["LayerStream"]
