"""Verbs from Python on a machine without RDMA devices: options, reasons, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtransfer import transport
from kvtransfer.cli import replay
from kvtransfer.cli.main import app
from kvtransfer.engine.config import ClusterConfig
from kvtransfer.errors import InvalidArgument, KVTransferError, Unsupported
from kvtransfer.layout import BlockLayout
from kvtransfer.memory import MemoryRegion, make_pool
from kvtransfer.transport import TrafficManager, VerbsDomain, VerbsOptions, verbs_devices

LAYOUT = BlockLayout(2, 16, [64])

needs_no_device = pytest.mark.skipif(bool(verbs_devices()[0]), reason="this machine has a device")


def manager(**options: Any) -> TrafficManager:
    return TrafficManager(
        store=None, pool=make_pool(LAYOUT, 2), device=None, layout=LAYOUT, **options
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"port": 256}, "port can't be 256"),
        ({"port": -1}, "port can't be -1"),
        ({"gid_index": 300}, "gid_index can't be 300"),
        ({"timeout": 1000}, "timeout can't be 1000"),
        ({"send_depth": -5}, "send_depth can't be -5"),
        ({"kv_class": (-1, 0)}, "service_level can't be -1"),
        ({"model_class": (0, -1)}, "traffic_class can't be -1"),
        ({"post_method": "fast"}, "no post method 'fast'"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        VerbsOptions(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_class": (16, 0)}, "service level 16 of class kv is not in 0..15"),
        ({"model_class": (0, 256)}, "traffic class 256 of class model is not in 0..255"),
        ({"queue_pairs": 17}, "17 queue pairs"),
        ({"queue_pairs": 0}, "0 queue pairs"),
        ({"timeout": 32}, "timeout"),
        ({"retry_count": 8}, "retry_count"),
        ({"receive_depth": 8}, "receive depth"),
    ],
)
def test_options_are_judged_before_any_device_is_looked_for(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        VerbsDomain(options=VerbsOptions(**options), regions=[MemoryRegion(4096)])


def test_more_regions_exported_than_there_are_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no more exported"):
        VerbsDomain(regions=[MemoryRegion(4096)], exported=2)


@needs_no_device
def test_without_a_device_there_is_a_reason_and_opening_is_unsupported() -> None:
    ports, why = verbs_devices()
    assert ports == []
    assert why
    with pytest.raises(Unsupported, match="verbs: "):
        VerbsDomain(regions=[MemoryRegion(4096)])


@needs_no_device
def test_a_manager_that_is_to_use_verbs_does_not_fall_back() -> None:
    with pytest.raises(Unsupported):
        manager(transport="verbs")


LIBRARY = Path("/usr/lib/x86_64-linux-gnu/libibverbs.so.1")
WITHOUT = """
import kvtransfer
from kvtransfer.errors import Unsupported
from kvtransfer.transport import make_shm_ring, verbs_devices
ports, why = verbs_devices()
assert ports == [] and "libibverbs" in why, why
assert make_shm_ring(4096).peer == "far"
print("works without")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="hides the library in a mount namespace: needs root")
def test_the_package_works_on_a_machine_without_libibverbs(tmp_path: Path) -> None:
    hide = f"mount --bind {tmp_path}/empty {LIBRARY} && " if LIBRARY.exists() else ""
    (tmp_path / "empty").touch()
    script = f'{hide}exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, sys.executable, WITHOUT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "works without\n", done.stderr


def test_unknown_transports_and_copies_are_refused_with_what_there_is() -> None:
    with pytest.raises(InvalidArgument, match="there are shm and verbs"):
        manager(transport="pigeon")
    with pytest.raises(InvalidArgument, match="there are cpu and nic"):
        manager(copy="magic")


def test_copies_through_the_nic_need_verbs() -> None:
    with pytest.raises(InvalidArgument, match="need verbs"):
        manager(copy="nic")


def test_rings_are_counted_by_traffic_class() -> None:
    engine = manager()
    for name in ("kv", "model"):
        assert set(engine.ring_counters(name).values()) == {0}
    with pytest.raises(InvalidArgument, match="no traffic class 'bulk'"):
        engine.ring_counters("bulk")
    assert engine.hardware_counters() == {}
    assert engine.peer_attributes(0) == []


def config(**changes: Any) -> ClusterConfig:
    fields: dict[str, Any] = {"name": "x", "namespace": "00" * 32, "layer_planes": [[4]]}
    return ClusterConfig(store="/tmp/unused", **{**fields, **changes})


def test_engines_get_the_devices_in_turn() -> None:
    two = config(num_prefill=2, num_decode=3, verbs_devices=["a", "b"], transport="verbs")
    names = two.prefill_engines + two.decode_engines
    assert [two.verbs_device(name) for name in names] == ["a", "b", "a", "b", "a"]
    assert config().verbs_device("pe0") == "", "the first active one"


def test_configurations_that_can_not_work_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="copy=nic needs transport=verbs"):
        config(copy="nic")
    with pytest.raises(InvalidArgument, match="verbs_queue_pairs must be"):
        config(verbs_queue_pairs=17)


def ports(*states: str) -> list[dict[str, str]]:
    return [{"device": f"mlx5_{i}", "state": state} for i, state in enumerate(states)]


def test_replay_uses_active_devices_or_those_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "verbs_devices", lambda: (ports("active", "down", "active"), ""))
    assert replay._devices("") == ["mlx5_0", "mlx5_2"]
    assert replay._devices("mlx5_2,mlx5_0") == ["mlx5_2", "mlx5_0"]
    with pytest.raises(InvalidArgument, match="'mlx5_1' is not one of mlx5_0, mlx5_2"):
        replay._devices("mlx5_1")


def test_replay_over_verbs_without_a_device_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "verbs_devices", lambda: ([], "no such hardware"))
    result = CliRunner().invoke(app, ["replay", "--transport", "verbs"])
    assert isinstance(result.exception, KVTransferError)
    assert str(result.exception) == "--transport verbs: no such hardware"
    monkeypatch.setattr(transport, "verbs_devices", lambda: (ports("down"), ""))
    with pytest.raises(Unsupported, match="no device has an active port"):
        replay._devices("")
