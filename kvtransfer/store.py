"""Full Blocks as files of one directory, found by chained keys."""

from kvtransfer._core import BlockStore

__all__ = ["BlockStore"]
