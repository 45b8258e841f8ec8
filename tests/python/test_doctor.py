"""kvtransfer doctor: what it says of machines that lack things."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from kvtransfer import doctor
from kvtransfer.cli.main import app
from kvtransfer.doctor import examine, usable
from kvtransfer.errors import InvalidArgument

NO_LIBRARY = "libibverbs.so.1: cannot open shared object file"
NO_KERNEL = "the kernel has no RDMA support loaded (Function not implemented)"
PORT = {
    "device": "mlx5_0",
    "port": 1,
    "link_layer": "Ethernet",
    "state": "active",
    "mtu_bytes": 4096,
    "gids": [{"index": 3, "gid": "::ffff:10.0.0.1", "type": "RoCE v2"}],
}


def with_devices(monkeypatch: pytest.MonkeyPatch, ports: list[dict[str, Any]], why: str) -> None:
    monkeypatch.setattr(doctor, "verbs_devices", lambda: (ports, why))


def verbs(findings: list[doctor.Finding]) -> doctor.Finding:
    return next(f for f in findings if f.group == "transport" and f.name == "verbs")


def test_every_failed_finding_has_a_reason_and_shm_always_works() -> None:
    findings = examine()
    assert {"system", "memory", "io", "rdma", "transport"} == {f.group for f in findings}
    assert all(f.found for f in findings)
    assert "shm" in usable(findings)


@pytest.mark.parametrize(
    ("why", "fix"),
    [(NO_LIBRARY, "apt install libibverbs1"), (NO_KERNEL, "modprobe"), ("", "rdma link add")],
)
def test_without_devices_the_reason_and_its_fix_are_named(
    monkeypatch: pytest.MonkeyPatch, why: str, fix: str
) -> None:
    with_devices(monkeypatch, [], why)
    finding = verbs(examine())
    assert finding.ok is False
    assert fix in finding.fix
    assert why in finding.found


def test_an_active_port_makes_verbs_work_and_shows_its_gids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_devices(monkeypatch, [PORT], "")
    findings = examine()
    assert usable(findings) == {"shm", "verbs"}
    port = next(f for f in findings if f.name == "mlx5_0 port 1")
    assert "3: ::ffff:10.0.0.1 RoCE v2" in port.found


def test_a_port_that_is_down_is_no_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, [{**PORT, "state": "down"}], "")
    findings = examine()
    assert usable(findings) == {"shm"}
    assert "ip link set" in next(f for f in findings if f.name == "mlx5_0 port 1").fix


def test_a_denied_io_uring_says_how_to_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_io", lambda _: ("threads", "io_uring_setup: denied"))
    finding = next(f for f in examine() if f.name == "io_uring")
    assert finding.ok is False
    assert "seccomp" in finding.fix


def test_require_decides_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, [], NO_LIBRARY)
    run = CliRunner()
    assert run.invoke(app, ["doctor", "--require", "shm"]).exit_code == 0
    refused = run.invoke(app, ["doctor", "--require", "shm,verbs"])
    assert refused.exit_code == 1
    assert "required, but does not work here: verbs" in refused.output
    with_devices(monkeypatch, [PORT], "")
    assert run.invoke(app, ["doctor", "--require", "verbs"]).exit_code == 0
    wrong = run.invoke(app, ["doctor", "--require", "carrier-pigeon"])
    assert isinstance(wrong.exception, InvalidArgument)


def test_json_has_what_the_table_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, [], NO_KERNEL)
    result = CliRunner().invoke(app, ["doctor", "--json", "--require", "verbs"])
    data = json.loads(result.output)
    assert data["missing"] == ["verbs"]
    assert {f["name"] for f in data["findings"]} >= {"memlock", "huge pages", "io_uring", "verbs"}
