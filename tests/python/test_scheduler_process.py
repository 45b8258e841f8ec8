"""The scheduler process over its real sockets, with the test as client and engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import zmq
from records import make_config

from kvtransfer.engine.cluster import new_cluster_name
from kvtransfer.engine.messages import (
    Assign,
    EngineLost,
    Finished,
    Hello,
    Journal,
    Message,
    Report,
    Result,
    Shutdown,
    Started,
    Submit,
    decode_message,
    encode_message,
    pack_tokens,
)
from kvtransfer.engine.scheduler_process import SchedulerProcess

T = TypeVar("T")


class Peer:
    """One identity on the scheduler's socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], name: str, address: str) -> None:
        self.name = name
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def say(self, message: Message) -> None:
        self.socket.send(encode_message(message))

    def hear(self, kind: type[T], timeout_ms: int = 5000) -> T:
        assert self.socket.poll(timeout_ms), f"{self.name} waits for {kind.__name__}"
        message = decode_message(self.socket.recv())
        assert isinstance(message, kind), message
        return message

    def silent(self) -> bool:
        return not self.socket.poll(150)


class Cast:
    """A scheduler in a thread, and who talks to it."""

    def __init__(self, store: Path, **changes: object) -> None:
        self.config = make_config(name=new_cluster_name(), store=str(store), **changes)
        self.scheduler = SchedulerProcess(self.config)
        self.thread = threading.Thread(target=self.scheduler.run)
        self.thread.start()
        self.context = zmq.Context()
        names = ["client", *self.config.prefill_engines, *self.config.decode_engines]
        self.peers = {n: Peer(self.context, n, self.config.scheduler_address) for n in names}

    def __getitem__(self, name: str) -> Peer:
        return self.peers[name]

    def start(self, capacity: int = 1000) -> None:
        for name, peer in self.peers.items():
            kind = {"p": "prefill", "d": "decode", "c": "client"}[name[0]]
            peer.say(Hello(engine=name, kind=kind, epoch=1, capacity_tokens=capacity))
        self["client"].hear(Started)
        for name in self.config.prefill_engines:
            self[name].hear(Started)

    def submit(self, request: int, tokens: int = 10, generate: int = 2) -> None:
        ids = pack_tokens(np.arange(tokens))
        self["client"].say(Submit(request_id=request, tokens=ids, num_generate=generate))

    def stop(self) -> None:
        self["client"].say(Shutdown())
        for name in (*self.config.prefill_engines, *self.config.decode_engines):
            self[name].say(Journal(engine=name))
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.context.destroy(linger=0)


@pytest.fixture
def cast(tmp_path: Path) -> Iterator[Cast]:
    cast = Cast(tmp_path)
    yield cast
    cast.stop()


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Cast]:
    cast = Cast(tmp_path, num_prefill=2, num_decode=2)
    yield cast
    cast.stop()


def test_nothing_starts_before_everyone_has_spoken(cast: Cast) -> None:
    cast["pe0"].say(Hello(engine="pe0", kind="prefill", epoch=1))
    cast["de0"].say(Hello(engine="de0", kind="decode", epoch=1, capacity_tokens=1000))
    assert cast["client"].silent()
    assert cast["pe0"].silent()
    cast["client"].say(Hello(engine="client", kind="client", epoch=0))
    started = cast["client"].hear(Started)
    assert (started.prefill, started.decode) == (["pe0"], ["de0"])
    assert cast["pe0"].hear(Started) == started


def test_a_request_reaches_its_pair_and_its_result_the_client(cast: Cast) -> None:
    cast.start()
    cast.submit(7)
    assign = cast["pe0"].hear(Assign)
    assert cast["de0"].hear(Assign) == assign
    assert (assign.request_id, assign.life, assign.num_generate) == (7, 1, 2)
    cast["de0"].say(Finished(request_id=7, life=1, tokens=pack_tokens([1, 2])))
    result = cast["client"].hear(Result)
    assert result.finished.tokens == pack_tokens([1, 2])
    assert result.lives == 1
    assert result.assigned_ns >= result.submitted_ns > 0


def test_answers_of_an_earlier_life_and_of_unknown_requests_are_ignored(cast: Cast) -> None:
    cast.start()
    cast.submit(1)
    cast["de0"].hear(Assign)
    cast["de0"].say(Finished(request_id=1, life=0, tokens=pack_tokens([9])))
    cast["de0"].say(Finished(request_id=99, life=1))
    assert cast["client"].silent()
    cast["de0"].say(Finished(request_id=1, life=1, tokens=pack_tokens([5])))
    assert cast["client"].hear(Result).finished.tokens == pack_tokens([5])
    cast["de0"].say(Finished(request_id=1, life=1))  # told twice
    assert cast["client"].silent()


def test_a_lost_engine_s_requests_get_a_new_life_elsewhere(pairs: Cast) -> None:
    pairs.start()
    pairs.submit(1)
    first = pairs["pe0"].hear(Assign)
    assert (first.prefill, first.decode) == ("pe0", "de0")
    pairs["de0"].hear(Assign)
    pairs["client"].say(EngineLost(engine="pe0", reason="killed"))
    for name in ("pe1", "de0", "de1"):
        assert pairs[name].hear(EngineLost).engine == "pe0"
    again = pairs["pe1"].hear(Assign)
    assert (again.request_id, again.life, again.prefill) == (1, 2, "pe1")
    pairs[again.decode].say(Finished(request_id=1, life=2))
    assert pairs["client"].hear(Result).lives == 2


def test_the_loss_of_the_last_engine_of_a_kind_fails_what_waits_for_it(cast: Cast) -> None:
    cast.start()
    cast.submit(1)
    cast["de0"].hear(Assign)
    cast["client"].say(EngineLost(engine="pe0", reason="killed by signal 9"))
    error = cast["client"].hear(Result).finished.error
    assert "pe0 was lost (killed by signal 9)" in error
    assert "no prefill engine is left" in error


def test_a_request_that_no_decode_engine_could_ever_hold_is_refused_at_once(cast: Cast) -> None:
    cast.start(capacity=50)
    cast.submit(1, tokens=45, generate=10)
    error = cast["client"].hear(Result).finished.error
    assert "55 tokens" in error
    assert "50" in error
    cast.submit(2, tokens=40, generate=10)
    assert cast["de0"].hear(Assign).request_id == 2


def test_an_overloaded_engine_gets_nothing_until_it_reports_room(tmp_path: Path) -> None:
    cast = Cast(tmp_path, beta=15)
    try:
        cast.start()
        for request in (1, 2, 3):
            cast.submit(request)
        assert [cast["pe0"].hear(Assign).request_id for _ in range(2)] == [1, 2]
        assert cast["pe0"].silent(), "tok_e is above beta"
        cast["pe0"].say(
            Report(
                engine="pe0",
                unfinished_requests=1,
                unfinished_tokens=10,
                read_queue_tokens=0,
                free_tokens=0,
                seen=[1, 2],
            )
        )
        assert cast["pe0"].hear(Assign).request_id == 3
    finally:
        cast.stop()


def test_garbage_and_strangers_do_not_disturb_it(cast: Cast) -> None:
    cast.start()
    stranger = Peer(cast.context, "stranger", cast.config.scheduler_address)
    stranger.socket.send(b"\xff\x00garbage")
    stranger.socket.send_multipart([b"too", b"many", b"frames"])
    stranger.say(
        Report(
            engine="stranger",
            unfinished_requests=0,
            unfinished_tokens=0,
            read_queue_tokens=0,
            free_tokens=0,
            seen=[],
        )
    )
    cast.submit(1)
    assert cast["pe0"].hear(Assign).request_id == 1
    stranger.socket.close()
