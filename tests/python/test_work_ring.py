"""The work ring from Python, over links that need no device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.errors import InvalidArgument
from kvtransfer.transport import WorkRing, make_null_ring, make_shm_ring

WRITE, READ, WRITE_IMM = 0, 1, 2


def rows(count: int, **fields: Any) -> npt.NDArray[np.void]:
    out = np.zeros(count, WorkRing.DTYPE)
    out["cookie"] = np.arange(count)
    for name, value in fields.items():
        out[name] = value
    return out


def retire_all(ring: WorkRing) -> list[tuple[int, str]]:
    out: list[tuple[int, str]] = []
    while ring.outstanding:
        some = ring.poll(1.0)
        assert some, "nothing retires any more"
        out += some
    return out


def test_rows_are_posted_in_one_doorbell_a_batch_and_retire_in_order() -> None:
    ring = make_null_ring(32)
    assert ring.post(rows(96, length=64)) == 96
    assert retire_all(ring) == [(i, "success") for i in range(96)]
    counters = ring.counters
    assert counters["work_requests"] == 96
    assert counters["doorbells"] == 3
    assert counters["write_bytes"] == 96 * 64
    assert counters["signalled"] < 96, "only some are signalled"


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_batch_decides_the_doorbells(batch: int) -> None:
    ring = make_null_ring(batch)
    lists = 192 // batch  # fewer requests than the send queue holds
    ring.post(rows(lists * batch, length=1))
    retire_all(ring)
    assert ring.counters["doorbells"] == lists


def test_an_unknown_operation_is_refused_with_its_row_and_nothing_is_posted() -> None:
    ring = make_null_ring()
    wrong = rows(4, op=WRITE)
    wrong["op"][2] = 9
    with pytest.raises(InvalidArgument, match="row 2 has op 9"):
        ring.post(wrong)
    assert ring.outstanding == 0


def test_a_full_ring_takes_a_prefix() -> None:
    ring = make_null_ring()
    many = rows(10_000)
    taken = ring.post(many)
    assert 0 < taken < 10_000
    assert [cookie for cookie, _ in retire_all(ring)] == list(range(taken))
    assert ring.post(many[taken:]) > 0


def test_a_bad_range_is_one_root_cause_and_the_rest_is_flushed() -> None:
    ring = make_shm_ring(1 << 16, 32)
    batch = rows(8, length=64)
    batch["remote_offset"][3] = 1 << 16
    assert ring.post(batch) == 8
    retired = retire_all(ring)
    assert [cookie for cookie, _ in retired] == list(range(8))
    assert retired[3] == (3, "remote access error")
    # Of what was posted unsignalled before it nothing is known: it may have run.
    assert all(status == "flushed" for cookie, status in retired if cookie != 3)
    assert ring.failed
    assert ring.drained
    failure = ring.failure or ""
    assert "with peer far" in failure
    assert "64 bytes" in failure
    assert ring.post(rows(1)) == 0, "a failed ring takes nothing"


def test_taking_a_ring_down_says_so() -> None:
    ring = make_null_ring()
    assert ring.failure is None
    ring.post(rows(3))
    ring.fail()
    retire_all(ring)
    assert ring.failure == "taken down by the caller"


def test_immediates_go_to_the_peer_and_polling_without_any_ends_in_time() -> None:
    ring = make_shm_ring(1 << 12, 4)
    ring.post(rows(5, op=WRITE_IMM, immediate=7))
    assert retire_all(ring) == [(i, "success") for i in range(5)]
    assert ring.poll_immediates(0.01) == [], "the far side sent none"


@settings(max_examples=40)
@given(
    st.integers(1, 64),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4096)), min_size=1, max_size=200),
)
def test_whatever_is_posted_retires_once_and_bytes_are_counted(
    batch: int, script: list[tuple[int, int]]
) -> None:
    ring = make_shm_ring(1 << 14, batch)
    posted = rows(len(script), op=[op for op, _ in script], length=[n for _, n in script])
    assert ring.post(posted) == len(script)
    assert retire_all(ring) == [(i, "success") for i in range(len(script))]
    counters = ring.counters
    assert counters["read_bytes"] == sum(n for op, n in script if op == READ)
    assert counters["write_bytes"] == sum(n for op, n in script if op != READ)
    assert counters["doorbells"] <= -(-len(script) // batch)


def test_driving_reports_a_time_for_every_full_batch() -> None:
    ring = make_null_ring(16)
    posting, total, per_batch = ring.drive(rows(4, length=8), 1600, 256)
    assert 0 < posting <= total
    assert len(per_batch) == 100
    assert (per_batch > 0).all()
    assert ring.outstanding == 0
    with pytest.raises(InvalidArgument, match="no rows"):
        ring.drive(rows(0), 10, 10)
