"""KV-cache loading over both paths: storage to prefill, and storage to decode to prefill.

The low-level library: :mod:`~kvtransfer.layout`, :mod:`~kvtransfer.memory`,
:mod:`~kvtransfer.keys`, :mod:`~kvtransfer.store`, :mod:`~kvtransfer.stream`,
:mod:`~kvtransfer.transport`. The system on top: :mod:`~kvtransfer.scheduler`,
:mod:`~kvtransfer.engine`, :mod:`~kvtransfer.models`, :mod:`~kvtransfer.workload`.
"""

from kvtransfer.errors import KVTransferError
from kvtransfer.keys import Namespace, chain_keys
from kvtransfer.layout import BlockLayout, PagedCache
from kvtransfer.memory import BufferPool, MemoryRegion, make_pool
from kvtransfer.store import BlockStore
from kvtransfer.stream import LayerStream
from kvtransfer.transport import TrafficManager

__all__ = [
    "BlockLayout",
    "BlockStore",
    "BufferPool",
    "KVTransferError",
    "LayerStream",
    "MemoryRegion",
    "Namespace",
    "PagedCache",
    "TrafficManager",
    "__version__",
    "chain_keys",
    "make_pool",
]
__version__ = "0.1.0"
