"""The cold tier against a real S3-compatible server on this machine, and against hostile answers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slots import ROOT_KEY, get, put

from kvtransfer import BlockLayout, BlockStore, chain_keys
from kvtransfer.errors import InvalidArgument
from kvtransfer.object_tier import ObjectTier, open_object_store

obstore = pytest.importorskip("obstore", reason="needs the extra `object`")

LAYOUT = BlockLayout(3, 8, [512])
KEYS = chain_keys(ROOT_KEY, np.arange(8 * 8), 8)
CREDENTIALS = {
    "aws_access_key_id": "test",
    "aws_secret_access_key": "test",
    "region": "us-east-1",
    "virtual_hosted_style_request": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """moto's S3 server in a process of its own; the address of a bucket."""
    pytest.importorskip("moto", reason="needs moto[server]")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(200):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        endpoint = f"http://127.0.0.1:{port}"
        import urllib.request

        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/blocks", method="PUT")).read()
        yield endpoint
    finally:
        process.kill()
        process.wait()


def bucket(server: str, **more: Any) -> Any:
    return open_object_store(
        "s3://blocks",
        timeout_s=10,
        endpoint=server,
        client_options={"allow_http": True},
        **CREDENTIALS,
        **more,
    )


@pytest.fixture
def small(tmp_path: Path) -> BlockStore:
    return BlockStore(str(tmp_path / "one"), ROOT_KEY, LAYOUT)


def test_what_one_host_uploads_another_downloads_byte_for_byte(
    server: str, small: BlockStore, tmp_path: Path
) -> None:
    data = put(small, KEYS)
    tier = ObjectTier(small, bucket(server))
    assert all(f.result(30) for f in tier.upload(KEYS, ROOT_KEY))
    assert all(f.result(30) for f in tier.upload(KEYS, ROOT_KEY))
    assert (tier.stats.uploaded, tier.stats.already_there) == (len(KEYS), len(KEYS))
    other = BlockStore(str(tmp_path / "two"), ROOT_KEY, LAYOUT)
    far = ObjectTier(other, bucket(server))
    assert far.fetch(KEYS, ROOT_KEY, 30) == len(KEYS)
    np.testing.assert_array_equal(get(other, KEYS), data)
    assert far.download(KEYS, ROOT_KEY) == [], "what is there is not asked for"
    assert far.stats.downloaded == len(KEYS)
    tier.close()
    far.close()


def test_another_namespace_finds_nothing(server: str, tmp_path: Path) -> None:
    other = BlockStore(str(tmp_path / "other"), bytes(32), LAYOUT)
    tier = ObjectTier(other, bucket(server))
    assert not any(f.result(30) for f in tier.download(KEYS, bytes(32)))
    assert tier.stats.not_there == len(KEYS)
    assert tier.fetch(KEYS, bytes(32), 30) == 0
    tier.close()


def memory_tier(store: BlockStore, **more: Any) -> tuple[ObjectTier, Any]:
    memory = obstore.store.MemoryStore()
    return ObjectTier(store, memory, **more), memory


def test_damaged_objects_are_misses_and_never_reach_the_store(
    small: BlockStore, tmp_path: Path
) -> None:
    put(small, KEYS)
    tier, memory = memory_tier(small)
    assert all(f.result(10) for f in tier.upload(KEYS, ROOT_KEY))
    names = sorted(meta["path"] for page in obstore.list(memory) for meta in page)
    first = (
        f"{ROOT_KEY.hex()}/"
        + Path(small.path_of(KEYS[2].tobytes(), KEYS[1].tobytes()))
        .relative_to(small.root)
        .as_posix()
    )
    assert first in names
    image = bytearray(obstore.get(memory, first).bytes().to_bytes())
    for damage in (bytes(image[:-1]), b"", bytes(image[:5000]) + b"?" + bytes(image[5001:])):
        obstore.put(memory, first, damage)
        other = BlockStore(
            str(tmp_path / f"two-{len(damage)}-{damage[-1:].hex()}"), ROOT_KEY, LAYOUT
        )
        far = ObjectTier(other, memory)
        assert far.fetch(KEYS, ROOT_KEY, 10) == 2, "the good prefix is kept"
        far.close()
        assert far.stats.corrupt == 1
        assert not list(Path(other.root).rglob(".tmp-*"))
    tier.close()


def test_a_bad_block_is_not_uploaded(small: BlockStore) -> None:
    put(small, KEYS)
    path = Path(small.path_of(KEYS[0].tobytes(), ROOT_KEY))
    raw = bytearray(path.read_bytes())
    raw[4100] ^= 1
    path.write_bytes(raw)
    tier, _ = memory_tier(small)
    results = [f.result(10) for f in tier.upload(KEYS, ROOT_KEY)]
    assert results == [False] + [True] * (len(KEYS) - 1)
    tier.close()


def test_a_server_that_does_not_answer_costs_a_deadline_and_is_a_miss(small: BlockStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        deaf = open_object_store(
            "s3://blocks",
            timeout_s=0.5,
            endpoint=endpoint,
            client_options={"allow_http": True},
            **CREDENTIALS,
        )
        tier = ObjectTier(small, deaf, threads=8)
        begin = time.monotonic()
        futures = tier.download(KEYS, ROOT_KEY)
        assert time.monotonic() - begin < 0.5, "asking does not wait"
        assert not any(f.result(30) for f in futures)
        assert tier.stats.failures == len(KEYS)
        assert small.lookup(KEYS, ROOT_KEY) == 0
        tier.close()


def test_more_than_may_wait_is_refused_and_a_cap_is_kept(tmp_path: Path, small: BlockStore) -> None:
    put(small, KEYS)
    tier, memory = memory_tier(small)
    assert all(f.result(10) for f in tier.upload(KEYS, ROOT_KEY))
    capped = BlockStore(str(tmp_path / "capped"), ROOT_KEY, LAYOUT, max_bytes=3 * small.file_bytes)
    far = ObjectTier(capped, memory, threads=1)
    assert far.fetch(KEYS, ROOT_KEY, 10) <= 3
    capped.evict()
    assert len(list(Path(capped.root).rglob("*.kvb"))) <= 3
    narrow = ObjectTier(BlockStore(str(tmp_path / "n"), ROOT_KEY, LAYOUT), memory, 1, 1)
    assert len(narrow.download(KEYS, ROOT_KEY)) < len(KEYS)
    assert narrow.stats.refused == 1
    for one in (tier, far, narrow):
        one.close()


def test_bad_addresses_and_options_say_so(small: BlockStore) -> None:
    with pytest.raises(InvalidArgument, match="nonsense"):
        open_object_store("nonsense://x")
    with pytest.raises(InvalidArgument, match="at least 1"):
        ObjectTier(small, obstore.store.MemoryStore(), threads=0)
