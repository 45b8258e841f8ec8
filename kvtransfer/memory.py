"""Host memory for transfers: regions and the lock-free pool of block slots."""

from kvtransfer._core import BlockLayout, BufferPool, HugePages, MemoryRegion, RegionKind
from kvtransfer.layout import header_bytes

__all__ = ["BufferPool", "HugePages", "MemoryRegion", "RegionKind", "make_pool"]


def make_pool(layout: BlockLayout, num_slots: int) -> BufferPool:
    """A shared-memory pool of ``num_slots`` slots, each a block file's image of ``layout``."""
    header = header_bytes(layout.num_layers)
    slot_bytes = BufferPool.slot_bytes_for(header, layout.full_block_bytes)
    return BufferPool(MemoryRegion(num_slots * slot_bytes), header, layout.full_block_bytes)
