"""Object storage behind a block store: a cold tier, never on the way of a hit.

Blocks that the store has are uploaded in the background; blocks that it misses can be asked for, are
downloaded in the background, verified, and are hits from then on. Nothing here waits unless told to:
a request that misses is computed, its next turn may hit. Needs the extra ``object`` (obstore, a
binding of the Rust crate object_store: S3, GCS, Azure, local folders).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import InvalidArgument, Unsupported
from kvtransfer.memory import RegionKind, make_pool
from kvtransfer.store import BlockStore

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["ObjectTier", "ObjectTierStats", "open_object_store"]

Block = tuple[bytes, bytes]  # key and parent


@dataclass(frozen=True)
class ObjectTierStats:
    """Counts since the tier was made."""

    uploaded: int = 0
    downloaded: int = 0
    already_there: int = 0  # uploads that were not needed
    not_there: int = 0  # downloads of blocks the bucket doesn't have
    corrupt: int = 0  # downloads that did not verify
    failures: int = 0  # requests that failed or were late
    refused: int = 0  # more than ``max_waiting`` wait already


def open_object_store(url: str, timeout_s: float = 10.0, **options: Any) -> ObjectStore:
    """The bucket or folder at ``url`` (s3://, gs://, az://, file://); ``options`` are obstore's.

    Credentials come from the environment as for the vendor's own tools. Every request ends within
    ``timeout_s`` and is tried at most three times. Raises Unsupported without obstore.
    """
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise Unsupported(
            "object storage needs obstore: pip install 'kvtransfer[object]'"
        ) from error
    limits: dict[str, Any] = {}
    if not url.startswith(("file:", "memory:")):
        limits["client_options"] = {
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=min(timeout_s, 5.0)),
            **options.pop("client_options", {}),
        }
        limits["retry_config"] = {
            "max_retries": 2,
            "retry_timeout": timedelta(seconds=timeout_s),
        }
    try:
        return from_url(url, **limits, **options)
    except Exception as error:  # obstore's own tree of errors
        raise InvalidArgument(f"object storage {url}: {error}") from error


class ObjectTier:
    """Uploads and downloads blocks of ``store`` with a few threads of its own.

    Thread safety: all methods may be called from any thread. ``close()`` ends it; what waits then is
    given up.
    """

    def __init__(
        self, store: BlockStore, bucket: ObjectStore, threads: int = 4, max_waiting: int = 4096
    ) -> None:
        if threads < 1 or max_waiting < 1:
            raise InvalidArgument("ObjectTier: threads and max_waiting must be at least 1")
        self._store = store
        self._bucket = bucket
        self._prefix = f"{store.name_space.hex()}/"
        self._max_waiting = max_waiting
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="kvt-object")
        self._local = threading.local()
        self._lock = threading.Lock()  # guards what follows
        self._waiting: dict[tuple[str, Block], Future[bool]] = {}
        self._stats = ObjectTierStats()

    @property
    def stats(self) -> ObjectTierStats:
        with self._lock:
            return self._stats

    def upload(self, keys: npt.NDArray[np.uint8], parent: bytes) -> list[Future[bool]]:
        """Starts uploading the blocks of a chain that are in the store. A future per block: whether
        the bucket has it then; none for what could not be queued."""
        return self._start("upload", self._upload, _chain(keys, parent))

    def download(self, keys: npt.NDArray[np.uint8], parent: bytes) -> list[Future[bool]]:
        """Starts downloading the blocks of a chain that the store doesn't have. A future per block:
        whether the store has it then. Blocks that wait already are not asked for twice."""
        blocks = list(_chain(keys, parent))
        known = self._store.lookup(keys, parent)
        return self._start("download", self._download, blocks[known:])

    def fetch(self, keys: npt.NDArray[np.uint8], parent: bytes, timeout_s: float) -> int:
        """Downloads what is missing and waits for it, at most ``timeout_s``; returns the length of
        the prefix that the store has then. For tools, and for engines that would rather wait."""
        deadline = time.monotonic() + timeout_s
        for future in self.download(keys, parent):
            try:
                if not future.result(max(deadline - time.monotonic(), 0)):
                    break
            except TimeoutError:
                break
        return self._store.lookup(keys, parent)

    def close(self) -> None:
        """Gives up what waits and ends the threads once their requests have ended."""
        self._workers.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------------ in the threads

    def _start(self, kind: str, work: Any, blocks: Iterable[Block]) -> list[Future[bool]]:
        futures = []
        for block in blocks:
            with self._lock:
                known = self._waiting.get((kind, block))
                full = known is None and len(self._waiting) >= self._max_waiting
                if known is None and not full:
                    known = self._workers.submit(self._guarded, kind, work, block)
                    self._waiting[kind, block] = known
            if full or known is None:
                self._count(refused=1)
                break
            futures.append(known)
        return futures

    def _guarded(self, kind: str, work: Any, block: Block) -> bool:
        try:
            return bool(work(block))
        except Exception:  # whatever the network or the vendor says: the block is a miss
            self._count(failures=1)
            return False
        finally:
            with self._lock:
                self._waiting.pop((kind, block), None)

    def _upload(self, block: Block) -> bool:
        import obstore

        path = Path(self._store.path_of(*block))
        name = self._name(path)
        try:
            obstore.head(self._bucket, name)
            self._count(already_there=1)
            return True
        except FileNotFoundError:
            pass
        if not path.exists() or self._check(path, block):
            return False  # evicted meanwhile, or bad: nothing bad leaves this machine
        obstore.put(self._bucket, name, path)
        self._count(uploaded=1)
        return True

    def _download(self, block: Block) -> bool:
        import obstore

        path = Path(self._store.path_of(*block))
        try:
            image = obstore.get(self._bucket, self._name(path)).bytes()
        except FileNotFoundError:
            self._count(not_there=1)
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".tmp-object-{secrets.token_hex(8)}"
        try:
            temporary.write_bytes(image)
            if self._check(temporary, block):
                self._count(corrupt=1)
                return False
            key = np.frombuffer(block[0], np.uint8)[None]
            blocks, reserved = self._store.admit(key, block[1])
            if blocks == 0:
                return False  # full
            try:
                with contextlib.suppress(FileExistsError):  # somebody was faster
                    os.link(temporary, path)
                self._store.lookup(key, block[1])  # counts it
            finally:
                self._store.end_writes(reserved)
        finally:
            temporary.unlink(missing_ok=True)
        self._count(downloaded=1)
        return True

    def _check(self, path: Path, block: Block) -> str:
        """A pool slot per thread: what can be found has been verified."""
        if not hasattr(self._local, "pool"):
            self._local.pool = make_pool(self._store.layout, 1, RegionKind.anonymous)
        return self._store.check_file(str(path), *block, self._local.pool, 0)

    def _name(self, path: Path) -> str:
        return self._prefix + path.relative_to(self._store.root).as_posix()

    def _count(self, **more: int) -> None:
        with self._lock:
            now = {f.name: getattr(self._stats, f.name) for f in fields(self._stats)}
            self._stats = replace(self._stats, **{k: now[k] + v for k, v in more.items()})


def _chain(keys: npt.NDArray[np.uint8], parent: bytes) -> Iterable[Block]:
    for key in keys:
        yield key.tobytes(), parent
        parent = key.tobytes()
