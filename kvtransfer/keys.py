"""Block keys: chained digests over token ids.

``key_i = SHA-256(key_{i-1} || token ids of block i as little-endian u32)`` with ``key_{-1}`` the
digest of a :class:`Namespace`. Two runs share a block only if everything that decides its bytes is
equal; nothing here depends on the process (Python's ``hash()`` does).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtransfer import _keychain
from kvtransfer._core import BlockLayout
from kvtransfer.errors import InvalidArgument

__all__ = ["KEY_BYTES", "Namespace", "chain_keys", "opaque_keys"]

KEY_BYTES = 32
KeyArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Namespace:
    """Everything besides the tokens that decides a block's bytes.

    ``shard`` is (rank, size) of tensor parallelism; ``adapter`` a LoRA name or ""; ``salt`` keeps
    tenants apart.
    """

    model: str
    revision: str
    dtype: str
    layout: BlockLayout
    shard: tuple[int, int] = (0, 1)
    adapter: str = ""
    salt: str = ""

    def digest(self) -> bytes:
        """32 bytes; the parent of each chain's first block."""
        fields = (
            "kvtransfer namespace v1",
            self.model,
            self.revision,
            self.dtype,
            str(self.layout),
            str(self.layout.digest),
            str(self.layout.block_tokens),
            f"{self.shard[0]}/{self.shard[1]}",
            self.adapter,
            self.salt,
        )
        state = hashlib.sha256()
        for field in fields:  # length-prefixed, so that no two field lists read the same
            data = field.encode()
            state.update(len(data).to_bytes(8, "little"))
            state.update(data)
        return state.digest()


def chain_keys(
    parent: bytes, tokens: npt.ArrayLike, block_tokens: int, *, start: int = 0
) -> KeyArray:
    """Keys ``[n, 32]`` of the full blocks of ``tokens[start:]``; a partial last block has none.

    ``parent`` is the namespace digest, or the key of the block that ends at ``start`` to extend a
    chain. Raises InvalidArgument for ids outside u32 or a bad parent.
    """
    if len(parent) != KEY_BYTES:
        raise InvalidArgument(f"parent must have {KEY_BYTES} bytes, got {len(parent)}")
    if block_tokens < 1:
        raise InvalidArgument(f"block_tokens must be positive, got {block_tokens}")
    ids = _as_u32(tokens)[start:]
    keys = np.empty((len(ids) // block_tokens, KEY_BYTES), np.uint8)
    chain = _keychain.chain if _keychain.available() else chain_in_python
    chain(parent, ids.view(np.uint8), 4 * block_tokens, keys.reshape(-1))
    return keys


def chain_in_python(
    parent: bytes, data: npt.NDArray[np.uint8], block_bytes: int, out: npt.NDArray[np.uint8]
) -> None:
    """The same loop over hashlib, for machines without a libcrypto to load."""
    view = data.data
    key = parent
    for i in range(len(out) // KEY_BYTES):
        state = hashlib.sha256(key)
        state.update(view[i * block_bytes : (i + 1) * block_bytes])
        key = state.digest()
        out[i * KEY_BYTES : (i + 1) * KEY_BYTES] = np.frombuffer(key, np.uint8)


def opaque_keys(hashes: Sequence[bytes]) -> KeyArray:
    """An engine's own block hashes (vLLM, SGLang, LMCache) as keys ``[n, 32]``.

    32-byte hashes are taken as they are; others are digested. The namespace still guards them: it
    is in every block's header and the first block's parent.
    """
    keys = [h if len(h) == KEY_BYTES else hashlib.sha256(b"opaque" + h).digest() for h in hashes]
    return np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY_BYTES)


def _as_u32(tokens: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    ids = np.asarray(tokens)
    if ids.ndim != 1:
        raise InvalidArgument(f"tokens must be one-dimensional, got shape {ids.shape}")
    if ids.size and not np.issubdtype(ids.dtype, np.integer):
        raise InvalidArgument(f"token ids must be integers, got {ids.dtype}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= 2**32):
        raise InvalidArgument("token ids must fit in u32")
    return np.ascontiguousarray(ids, dtype="<u4")
