"""Looking after a store: checking every block, and moving blocks in and out as an archive."""

from __future__ import annotations

import io
import os
import secrets
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import CorruptBlock, InvalidArgument, Mismatch
from kvtransfer.memory import BufferPool, make_pool
from kvtransfer.store import BlockStore

__all__ = ["Verified", "export_store", "import_store", "tree_depths", "verify_store"]

MANIFEST = "KVTRANSFER"
SUFFIX = ".kvb"

Report = Callable[[int, int], None]  # (blocks done, blocks in all)


@dataclass
class Verified:
    """What reading every block of a store showed."""

    good: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list)  # (path, why)
    unreachable: int = 0  # good, but a block before them is not there


def _no_report(done: int, total: int) -> None:
    pass


def tree_depths(
    keys: npt.NDArray[np.uint8], parents: npt.NDArray[np.uint8], root: bytes
) -> npt.NDArray[np.int64]:
    """Position of each block in its chain (0: first), -1 where a block before it is missing.

    ``keys`` and ``parents`` are [n, 32].
    """
    index = {key.tobytes(): i for i, key in enumerate(keys)}
    depths = np.full(len(keys), -2, np.int64)
    for start in range(len(keys)):
        path = []
        at = start
        while depths[at] == -2:
            depths[at] = -1  # also ends a forged cycle
            path.append(at)
            parent = parents[at].tobytes()
            if parent == root:
                depths[at] = 0
                path.pop()
                break
            if parent not in index:
                break
            at = index[parent]
        depth = int(depths[at])
        for i in reversed(path):
            depth = depth + 1 if depth >= 0 else -1
            depths[i] = depth
    return depths


def verify_store(store: BlockStore, remove: bool, report: Report = _no_report) -> Verified:
    """Read every block: size, header, checksums; ``remove`` the bad ones."""
    keys, parents, _ = store.list()
    depths = tree_depths(keys, parents, store.name_space)
    result = Verified()
    with _one_slot(store) as (pool, slots):
        for i, (key, parent) in enumerate(zip(keys, parents, strict=True)):
            block = key.tobytes(), parent.tobytes()
            path = store.path_of(*block)
            why = store.check_file(path, *block, pool, int(slots[0]))
            if not why:
                result.good += 1
                result.unreachable += bool(depths[i] < 0)
            elif Path(path).exists():  # else evicted meanwhile
                result.bad.append((path, why))
                if remove:
                    Path(path).unlink(missing_ok=True)
            report(i + 1, len(keys))
    return result


def export_store(store: BlockStore, out: BinaryIO, report: Report = _no_report) -> int:
    """Write the manifest and all blocks that verify, parents first, as a tar; return how many."""
    keys, parents, _ = store.list()
    depths = tree_depths(keys, parents, store.name_space)
    count = 0
    with tarfile.open(fileobj=out, mode="w|") as archive, _one_slot(store) as (pool, slots):
        manifest = Path(store.root, MANIFEST).read_bytes()
        member = tarfile.TarInfo(MANIFEST)
        member.size = len(manifest)
        archive.addfile(member, io.BytesIO(manifest))
        order = [int(i) for i in np.argsort(depths, kind="stable") if depths[i] >= 0]
        image = pool.region.array()[: store.file_bytes]
        for done, i in enumerate(order):
            block = keys[i].tobytes(), parents[i].tobytes()
            path = Path(store.path_of(*block))
            if not store.check_file(str(path), *block, pool, int(slots[0])):
                member = tarfile.TarInfo(path.relative_to(store.root).as_posix())
                member.size = store.file_bytes
                archive.addfile(member, io.BytesIO(image.tobytes()))
                count += 1
            report(done + 1, len(order))
    return count


def import_store(root: str, source: BinaryIO, report: Report = _no_report) -> tuple[int, int]:
    """Add the blocks of an export to the store at ``root``, made if it isn't there.

    Returns (added, already there). Every block is verified before it can be found. Raises
    Mismatch if the store is of another namespace, layout or encoding, CorruptBlock for an archive that
    is none or holds a bad block; what was added before that stays.
    """
    try:
        archive = tarfile.open(fileobj=source, mode="r|")  # noqa: SIM115
        first = archive.next()
    except tarfile.TarError as error:
        raise CorruptBlock(f"import: not an export of a store: {error}") from error
    with archive:
        if first is None or first.name != MANIFEST or not first.isfile() or first.size > 1 << 20:
            raise CorruptBlock("import: not an export of a store: it doesn't begin with a manifest")
        store = _open_for(root, _read(archive, first, first.size))
        added = there = 0
        with _one_slot(store) as (pool, slots):
            try:
                while (member := archive.next()) is not None:
                    fresh = _import_block(store, archive, member, pool, slots)
                    added, there = added + fresh, there + (not fresh)
                    report(added + there, 0)
            except tarfile.TarError as error:
                raise CorruptBlock(f"import: the archive ends early: {error}") from error
    return added, there


def _open_for(root: str, manifest: bytes) -> BlockStore:
    path = Path(root, MANIFEST)
    if path.exists():
        if path.read_bytes() != manifest:
            raise Mismatch(
                f"import: {root} is of another namespace, layout or encoding than the archive: "
                f"[{path.read_text(errors='replace')}] and [{manifest.decode(errors='replace')}]"
            )
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        if any(path.parent.iterdir()):
            raise InvalidArgument(f"import: {root} is not empty and no store")
        path.write_bytes(manifest)
        try:
            return BlockStore.open_existing(root)
        except Exception:
            path.unlink()
            raise
    return BlockStore.open_existing(root)


def _import_block(
    store: BlockStore,
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    pool: BufferPool,
    slots: npt.NDArray[np.uint32],
) -> bool:
    name = PurePosixPath(member.name).name
    key_hex, _, parent_hex = name.removesuffix(SUFFIX).partition("-")
    try:
        key, parent = bytes.fromhex(key_hex), bytes.fromhex(parent_hex)
    except ValueError:
        key = parent = b""
    if len(key) != 32 or len(parent) != 32 or not member.isfile():
        raise CorruptBlock(f"import: {member.name!r} is no block")
    if member.size != store.file_bytes:
        raise CorruptBlock(
            f"import: {member.name!r} has {member.size} bytes, blocks of this store have "
            f"{store.file_bytes}"
        )
    path = Path(store.path_of(key, parent))
    image = _read(archive, member, member.size)
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".tmp-import-{secrets.token_hex(8)}"
    temporary.write_bytes(image)
    try:
        # Under its own name only after it has been read back whole and right.
        why = store.check_file(str(temporary), key, parent, pool, int(slots[0]))
        if why:
            raise CorruptBlock(f"import: {member.name!r}: {why}")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo, size: int) -> bytes:
    file = archive.extractfile(member)
    data = file.read(size) if file is not None else b""
    if len(data) != size:
        raise CorruptBlock(f"import: {member.name!r} is cut off")
    return data


@contextmanager
def _one_slot(store: BlockStore) -> Iterator[tuple[BufferPool, npt.NDArray[np.uint32]]]:
    pool = make_pool(store.layout, 1)
    slots = pool.acquire(1)
    assert slots is not None
    yield pool, slots
    pool.release(slots)
