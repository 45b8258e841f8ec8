"""pyverbs as the independent peer: it posts to us, we post to it, and it checks every byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvtransfer.errors import InvalidArgument
from kvtransfer.memory import MemoryRegion
from kvtransfer.pyverbs import as_memory_region, ring_over
from kvtransfer.transport import VerbsDomain, VerbsOptions, WorkRing

pytest.importorskip("pyverbs")

from pyverbs import enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

BYTES = 1 << 18
GID_INDEX = 1
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE


class Peer:
    """A queue pair that pyverbs made, with a region of its own."""

    def __init__(self, device: str, *, send_depth: int = 64) -> None:
        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 256)
        cap = QPCap(max_send_wr=send_depth, max_recv_wr=64)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap))
        self.region = MemoryRegion(BYTES)
        self.bytes = self.region.array()
        self.mr = as_memory_region(self.pd, self.region, ACCESS)
        self.psn = 77

    @property
    def gid(self) -> GID:
        return self.context.query_gid(1, GID_INDEX)

    def connect(self, number: int, psn: int, gid: GID) -> None:
        route = GlobalRoute(dgid=gid, sgid_index=GID_INDEX, hop_limit=64)
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = ACCESS
        attributes.dest_qp_num = number
        attributes.rq_psn, attributes.sq_psn = psn, self.psn
        attributes.path_mtu = e.IBV_MTU_1024
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = 4
        attributes.min_rnr_timer = 12
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 18, 7, 7
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        self.qp.to_rts(attributes)

    def completions(self, count: int) -> list[Any]:
        done: list[Any] = []
        for _ in range(200_000):
            _, some = self.cq.poll(16)
            done += some
            if len(done) >= count:
                return done
        raise AssertionError(f"{len(done)} of {count} completions came")


def _pair() -> tuple[Peer, Peer]:
    a, b = Peer("rxe0"), Peer("rxe1")
    a.connect(b.qp.qp_num, b.psn, b.gid)
    b.connect(a.qp.qp_num, a.psn, a.gid)
    return a, b


def _retire(ring: WorkRing, count: int) -> list[tuple[int, str]]:
    out: list[tuple[int, str]] = []
    for _ in range(100):
        out += ring.poll(0.5)
        if len(out) >= count:
            return out
    raise AssertionError(f"{len(out)} of {count} retired")


def _rows(*rows: tuple[int, int, int, int, int]) -> np.ndarray[Any, Any]:
    """(op, local offset, remote offset, length, immediate) -> the ring's rows."""
    out = np.zeros(len(rows), WorkRing.DTYPE)
    for i, (op, local, remote, length, immediate) in enumerate(rows):
        out[i] = (local, remote, length, i, immediate, 0, 0, op)
    return out


def test_our_ring_posts_on_a_queue_pair_that_pyverbs_brought_up() -> None:
    ours, theirs = _pair()
    rng = np.random.default_rng(1)
    ours.bytes[:] = rng.integers(0, 256, BYTES, np.uint8)
    theirs.bytes[:] = 0
    theirs.qp.post_recv(RecvWR(wr_id=5, num_sge=1, sg=[SGE(theirs.mr.buf, 64, theirs.mr.lkey)]))
    ring = ring_over(
        ours.qp,
        send_depth=64,
        regions=[ours.region],
        remote=[(theirs.mr.buf, BYTES, theirs.mr.rkey)],
    )
    rows = _rows((0, 100, 5000, 40_000, 0), (0, 50_000, 60_000, 7, 0), (2, 0, 0, 64, 0xABCD))
    assert ring.post(rows) == 3
    assert _retire(ring, 3) == [(0, "success"), (1, "success"), (2, "success")]
    assert np.array_equal(theirs.bytes[5000:45_000], ours.bytes[100:40_100])
    assert np.array_equal(theirs.bytes[60_000:60_007], ours.bytes[50_000:50_007])
    (seen,) = theirs.completions(1)
    assert seen.wr_id == 5
    assert seen.opcode == e.IBV_WC_RECV_RDMA_WITH_IMM
    assert int.from_bytes(seen.imm_data.to_bytes(4, "little"), "big") == 0xABCD
    # Reads: what the far side holds now comes back.
    theirs.bytes[:4096] = rng.integers(0, 256, 4096, np.uint8)
    assert ring.post(_rows((1, 200_000, 0, 4096, 0))) == 1
    _retire(ring, 1)
    assert np.array_equal(ours.bytes[200_000:204_096], theirs.bytes[:4096])
    assert ring.counters["doorbells"] == 2


def test_a_ring_over_a_foreign_queue_pair_drains_when_it_fails() -> None:
    ours, theirs = _pair()
    ring = ring_over(
        ours.qp,
        send_depth=64,
        regions=[ours.region],
        remote=[(theirs.mr.buf, BYTES, theirs.mr.rkey ^ 0x1100)],
    )
    assert ring.post(_rows((0, 0, 0, 64, 0), (0, 0, 64, 64, 0))) == 2
    retired = _retire(ring, 2)
    assert retired[0] == (0, "remote access error")
    assert retired[1] == (1, "flushed")
    assert ring.failed
    assert ring.drained
    assert "remote access" in (ring.failure or "")


def test_pyverbs_writes_into_our_region_and_reads_from_it() -> None:
    region = MemoryRegion(BYTES)
    data = region.array()
    domain = VerbsDomain(options=VerbsOptions(device="rxe0"), regions=[region])
    keys = domain.region(0)
    assert keys["address"] == data.ctypes.data
    endpoint = domain.make_endpoint(name="ours", epoch=1)
    peer = Peer("rxe1")
    # Its end of our blob: the queue pair number and PSN stand right behind the fixed part.
    number, psn = np.frombuffer(endpoint.blob(), np.uint32, 2, 120)
    peer.connect(int(number), int(psn), GID("0000:0000:0000:0000:0000:ffff:0a4d:0001"))
    ring = endpoint.connect(_blob_of(peer))
    rng = np.random.default_rng(2)
    peer.bytes[:] = rng.integers(0, 256, BYTES, np.uint8)
    data[:] = 0
    write = SendWR(
        wr_id=1,
        opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM,
        num_sge=1,
        imm_data=int.from_bytes((4711).to_bytes(4, "big"), "little"),
        sg=[SGE(peer.mr.buf, 30_000, peer.mr.lkey)],
    )
    write.set_wr_rdma(keys["remote_key"], keys["address"] + 1000)
    peer.qp.post_send(write)
    assert peer.completions(1)[0].status == e.IBV_WC_SUCCESS
    assert ring.poll_immediates(10.0) == [4711]
    assert np.array_equal(data[1000:31_000], peer.bytes[:30_000])
    read = SendWR(
        wr_id=2,
        opcode=e.IBV_WR_RDMA_READ,
        num_sge=1,
        sg=[SGE(peer.mr.buf + 100_000, 5000, peer.mr.lkey)],
    )
    read.set_wr_rdma(keys["remote_key"], keys["address"] + 2000)
    peer.qp.post_send(read)
    assert peer.completions(1)[0].status == e.IBV_WC_SUCCESS
    assert np.array_equal(peer.bytes[100_000:105_000], data[2000:7000])
    # And we write into a region that pyverbs registered.
    data[:5000] = rng.integers(0, 256, 5000, np.uint8)
    assert ring.post(_rows((0, 0, 200_000, 5000, 0))) == 1
    assert _retire(ring, 1) == [(0, "success")]
    assert np.array_equal(peer.bytes[200_000:205_000], data[:5000])


def _blob_of(peer: Peer) -> bytes:
    """An endpoint blob written by hand from docs/wire_format.md, its checksum with xxhash."""
    import xxhash

    name = b"pyverbs".ljust(64, b"\0")
    gid = bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 2])
    body = np.array([9], "<u8").tobytes() + gid + (0).to_bytes(2, "little")
    body += bytes([0, e.IBV_MTU_1024, 4, 1]) + (1).to_bytes(2, "little") + name
    body += np.array([peer.qp.qp_num, peer.psn], "<u4").tobytes()
    body += np.array([peer.mr.buf, BYTES], "<u8").tobytes()
    body += np.array([peer.mr.rkey, 0], "<u4").tobytes()
    head = b"KVTVERBS" + np.array([1, 24 + len(body)], "<u4").tobytes()
    return head + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little") + body


def test_what_is_no_live_queue_pair_is_refused() -> None:
    ours, _ = _pair()
    for wrong in (ours.pd, "a queue pair", None):
        with pytest.raises(InvalidArgument, match="needs a pyverbs"):
            ring_over(wrong, send_depth=8, regions=[], remote=[])
