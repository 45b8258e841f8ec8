"""Full-block and layer-block layouts, engine caches, and the copies between them."""

from kvtransfer._core import BlockLayout, CacheLayer, CachePlane, PagedCache, header_bytes

__all__ = ["BlockLayout", "CacheLayer", "CachePlane", "PagedCache", "header_bytes"]
