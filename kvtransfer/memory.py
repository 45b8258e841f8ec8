"""Host memory for transfers: regions and the lock-free pool of block slots."""

from kvtransfer._core import BlockLayout, BufferPool, HugePages, MemoryRegion, RegionKind
from kvtransfer.layout import header_bytes

__all__ = ["BufferPool", "HugePages", "MemoryRegion", "RegionKind", "make_pool"]


def make_pool(
    layout: BlockLayout,
    num_slots: int,
    kind: RegionKind = RegionKind.shared,
    huge_pages: HugePages = HugePages.auto,
) -> BufferPool:
    """A pool of ``num_slots`` slots, each a block file's image of ``layout``.

    ``shared`` memory is what engines of one host map of each other; ``anonymous`` memory gets
    transparent huge pages without being asked for at boot, which storage reads gain much from
    (docs/tuning.md).
    """
    header = header_bytes(layout.num_layers)
    slot_bytes = BufferPool.slot_bytes_for(header, layout.full_block_bytes)
    region = MemoryRegion(num_slots * slot_bytes, kind, huge_pages)
    return BufferPool(region, header, layout.full_block_bytes)
