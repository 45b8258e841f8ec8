"""Checking, exporting and importing stores, as functions and as ``kvtransfer store``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slots import ROOT_KEY, get, put

from kvtransfer import BlockLayout, BlockStore, KVTransferError, chain_keys
from kvtransfer.errors import CorruptBlock, InvalidArgument, Mismatch
from kvtransfer.maintenance import export_store, import_store, tree_depths, verify_store

LAYOUT = BlockLayout(3, 8, [64, 32])
KEYS = chain_keys(ROOT_KEY, np.arange(6 * 8), 8)


@pytest.fixture
def small(tmp_path: Path) -> BlockStore:
    return BlockStore(str(tmp_path / "small"), ROOT_KEY, LAYOUT)


def path_of(store: BlockStore, block: int) -> Path:
    parent = ROOT_KEY if block == 0 else KEYS[block - 1].tobytes()
    return Path(store.path_of(KEYS[block].tobytes(), parent))


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtransfer.cli.main", "store", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_store_can_be_opened_by_what_its_manifest_says(small: BlockStore) -> None:
    data = put(small, KEYS)
    again = BlockStore.open_existing(small.root)
    assert again.layout == LAYOUT
    assert again.name_space == ROOT_KEY
    np.testing.assert_array_equal(get(again, KEYS), data)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"nonsense\n",
        b"kvtransfer block store, format 1\n",
        b"kvtransfer block store, format 2\nnamespace 00\nblock_tokens 8\nlayers 1 x 8\n",
        b"kvtransfer block store, format 2\nnamespace " + b"0" * 64 + b"\nlayers 1 x 8\n",
        b"kvtransfer block store, format 2\nnamespace " + b"0" * 64 + b"\nblock_tokens 8\n",
        b"kvtransfer block store, format 2\nnamespace "
        + b"0" * 64
        + b"\nblock_tokens 8\nlayers 99999999999 x 8\n",
        b"kvtransfer block store, format 2\nnamespace "
        + b"0" * 64
        + b"\nblock_tokens 8\nlayers 1 y 8\n",
        b"kvtransfer block store, format 2\nnamespace "
        + b"0" * 64
        + b"\nblock_tokens 8\nlayers 1 x -3\n",
        b"\xff\xfe" * 3000,
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "KVTRANSFER").write_bytes(text)
    with pytest.raises(Mismatch, match="manifest"):
        BlockStore.open_existing(str(tmp_path))


@settings(max_examples=200, deadline=None)
@given(noise=st.binary(max_size=300), at=st.integers(0, 200), keep=st.booleans())
def test_no_manifest_crashes_the_reader(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int, keep: bool
) -> None:
    folder = tmp_path_factory.mktemp("m")
    BlockStore(str(folder), ROOT_KEY, LAYOUT)
    manifest = (folder / "KVTRANSFER").read_bytes()
    damaged = manifest[:at] + noise + (manifest[at + len(noise) :] if keep else b"")
    (folder / "KVTRANSFER").write_bytes(damaged)
    with contextlib.suppress(KVTransferError):
        BlockStore.open_existing(str(folder))


def test_depths_are_positions_in_the_chain_and_orphans_have_none() -> None:
    parents = np.concatenate([np.frombuffer(ROOT_KEY, np.uint8)[None], KEYS[:-1]])
    order = np.array([5, 0, 3, 1, 4, 2])
    np.testing.assert_array_equal(tree_depths(KEYS[order], parents[order], ROOT_KEY), order)
    some = np.array([0, 1, 3, 4])
    assert tree_depths(KEYS[some], parents[some], ROOT_KEY).tolist() == [0, 1, -1, -1]
    cycle = KEYS[[0, 1]]
    assert tree_depths(cycle, cycle[::-1], ROOT_KEY).tolist() == [-1, -1]


def test_verify_finds_every_kind_of_damage_and_removes_only_when_told(small: BlockStore) -> None:
    put(small, KEYS)
    raw = bytearray(path_of(small, 1).read_bytes())
    raw[5000] ^= 1
    path_of(small, 1).write_bytes(raw)
    os.replace(path_of(small, 4), path_of(small, 3))
    seen: list[tuple[int, int]] = []
    found = verify_store(small, False, lambda done, total: seen.append((done, total)))
    assert found.good == 3
    reasons = dict(found.bad)
    assert "checksum of layer" in reasons[str(path_of(small, 1))]
    assert "other block's key" in reasons[str(path_of(small, 3))]
    assert seen[-1] == (5, 5)
    assert path_of(small, 1).exists()
    verify_store(small, True)
    assert not path_of(small, 1).exists()
    assert verify_store(small, False).bad == []


def test_an_export_is_imported_byte_for_byte_and_twice_changes_nothing(
    small: BlockStore, tmp_path: Path
) -> None:
    data = put(small, KEYS)
    archive = io.BytesIO()
    assert export_store(small, archive) == 6
    target = str(tmp_path / "target")
    archive.seek(0)
    assert import_store(target, archive) == (6, 0)
    np.testing.assert_array_equal(get(BlockStore(target, ROOT_KEY, LAYOUT), KEYS), data)
    archive.seek(0)
    assert import_store(target, archive) == (0, 6)


def test_bad_and_unreachable_blocks_are_not_exported(small: BlockStore) -> None:
    put(small, KEYS)
    path_of(small, 3).unlink()
    raw = bytearray(path_of(small, 2).read_bytes())
    raw[-1] ^= 1  # padding: harmless
    raw[4096] ^= 1
    path_of(small, 2).write_bytes(raw)
    archive = io.BytesIO()
    assert export_store(BlockStore.open_existing(small.root), archive) == 2


def test_hostile_archives_are_refused_and_leave_nothing(small: BlockStore, tmp_path: Path) -> None:
    put(small, KEYS)
    archive = io.BytesIO()
    export_store(small, archive)
    whole = archive.getvalue()
    target = tmp_path / "target"

    def refuse(data: bytes, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            import_store(str(target), io.BytesIO(data))
        assert not list(target.rglob(".tmp-*"))
        assert not (tmp_path / "outside").exists()

    refuse(b"", CorruptBlock, "not an export")
    refuse(b"x" * 5000, CorruptBlock, "not an export")
    refuse(whole[: len(whole) // 2], CorruptBlock, "cut off|ends early|verify|differs")
    refuse(repack(whole, lambda m, d: (m, d[:-1])), CorruptBlock, "bytes")
    refuse(repack(whole, lambda m, d: (m, d[:5000] + b"?" + d[5001:])), CorruptBlock, "checksum")
    escape = repack(whole, lambda m, d: (f"../../outside/{Path(m).name}x", d))
    refuse(escape, CorruptBlock, "no block")
    other = BlockStore(str(tmp_path / "other"), bytes(32), LAYOUT)
    with pytest.raises(Mismatch, match="another namespace"):
        import_store(other.root, io.BytesIO(whole))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(InvalidArgument, match="not empty"):
        import_store(str(tmp_path / "full"), io.BytesIO(whole))


def repack(archive: bytes, change) -> bytes:  # type: ignore[no-untyped-def]
    out = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as source,
        tarfile.open(fileobj=out, mode="w") as to,
    ):
        for i, member in enumerate(source):
            file = source.extractfile(member)
            assert file is not None
            name, data = member.name, file.read()
            if i > 0:
                name, data = change(name, data)
            changed = tarfile.TarInfo(name)
            changed.size = len(data)
            to.addfile(changed, io.BytesIO(data))
    return out.getvalue()


def test_the_command_shows_checks_shrinks_and_moves_a_store(
    small: BlockStore, tmp_path: Path
) -> None:
    put(small, KEYS)
    stat = json.loads(run("stat", small.root, "--json").stdout)
    assert (stat["blocks"], stat["chains"], stat["longest_chain"]) == (6, 1, 6)
    rows = json.loads(run("ls", small.root, "--json").stdout)
    assert {row["position"] for row in rows} == set(range(6))
    assert run("verify", small.root).returncode == 0
    archive = tmp_path / "blocks.tar"
    assert run("export", small.root, archive).returncode == 0
    assert json.loads(run("import", tmp_path / "new", archive, "--json").stdout)["added"] == 6
    kept = json.loads(run("gc", small.root, "--max-bytes", "20K", "--json").stdout)
    assert kept["blocks"] < 6
    assert kept["bytes"] <= 20 << 10
    (path_of(small, 0)).write_bytes(b"short")
    bad = run("verify", tmp_path / "new")
    assert bad.returncode == 0
    raw = bytearray(next((tmp_path / "new").rglob("*.kvb")).read_bytes())
    raw[4200] ^= 1
    next((tmp_path / "new").rglob("*.kvb")).write_bytes(raw)
    bad = run("verify", tmp_path / "new", "--remove", "--json")
    assert bad.returncode == 1
    assert json.loads(bad.stdout)["removed"] == 1
    assert json.loads(run("verify", tmp_path / "new", "--json").stdout)["unreachable"] >= 0


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    missing = run("stat", tmp_path / "nowhere")
    assert missing.returncode == 2
    assert "is no block store" in missing.stderr
    BlockStore(str(tmp_path / "s"), ROOT_KEY, LAYOUT)
    bad = run("gc", tmp_path / "s", "--max-bytes", "5 apples")
    assert bad.returncode == 2
    assert "500G" in bad.stderr
