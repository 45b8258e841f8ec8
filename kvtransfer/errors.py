"""The exceptions of kvtransfer.

KVTransferError
├── InvalidArgument      operands that make no sense; nothing was done (also a ValueError)
├── StorageError         a file operation failed (``sys_errno`` says how)
│   ├── StorageFull      the device or the byte cap is full; reads go on
│   ├── CorruptBlock     bytes that fail their checksum or header check
│   └── BlockNotFound    a block that is not there (any more)
├── Mismatch             a store, peer or message of another version, namespace or layout
├── TransferTimeout      a deadline passed (also a TimeoutError)
├── PeerLost             the other process or its link is gone
├── Exhausted            a bounded pool or queue has not enough left
├── Unsupported          this kernel, machine or build cannot do it
├── Cancelled            withdrawn by the caller
├── WorkloadError        a trace or session file that can't be read
├── ModelError           a model that can't be loaded or driven
└── ClusterError         an engine or the scheduler died or could not start
"""

from __future__ import annotations

__all__ = [
    "BlockNotFound",
    "Cancelled",
    "ClusterError",
    "CorruptBlock",
    "Exhausted",
    "InvalidArgument",
    "KVTransferError",
    "Mismatch",
    "ModelError",
    "PeerLost",
    "StorageError",
    "StorageFull",
    "TransferTimeout",
    "Unsupported",
    "WorkloadError",
]


class KVTransferError(Exception):
    """Root of the tree. ``code`` is the core's word for the kind, ``sys_errno`` an errno or 0."""

    code = "unknown"

    def __init__(self, message: str, sys_errno: int = 0) -> None:
        super().__init__(message)
        self.sys_errno = sys_errno


class InvalidArgument(KVTransferError, ValueError):
    code = "invalid_argument"


class StorageError(KVTransferError):
    code = "io"


class StorageFull(StorageError):
    code = "no_space"


class CorruptBlock(StorageError):
    code = "corrupt"


class BlockNotFound(StorageError):
    code = "not_found"


class Mismatch(KVTransferError):
    code = "mismatch"


class TransferTimeout(KVTransferError, TimeoutError):
    code = "timeout"


class PeerLost(KVTransferError):
    code = "peer_lost"


class Exhausted(KVTransferError):
    code = "exhausted"


class Unsupported(KVTransferError):
    code = "unsupported"


class Cancelled(KVTransferError):
    code = "cancelled"


class WorkloadError(KVTransferError):
    code = "workload"


class ModelError(KVTransferError):
    code = "model"


class ClusterError(KVTransferError):
    code = "cluster"


_CORE_CLASSES: tuple[type[KVTransferError], ...] = (
    InvalidArgument,
    StorageError,
    StorageFull,
    CorruptBlock,
    BlockNotFound,
    Mismatch,
    TransferTimeout,
    PeerLost,
    Exhausted,
    Unsupported,
    Cancelled,
)
_BY_CODE = {cls.code: cls for cls in _CORE_CLASSES}


def from_code(code: str, sys_errno: int, message: str) -> KVTransferError:
    """The exception for a core error code (called by the extension module)."""
    return _BY_CODE.get(code, KVTransferError)(message, sys_errno)
