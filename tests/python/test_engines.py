"""A prefill and a decode engine in threads, with the test as their scheduler: the protocol's corners
in a known order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
import zmq

from kvtransfer.engine.base import Engine
from kvtransfer.engine.cluster import new_cluster_name
from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.decode import DecodeEngine
from kvtransfer.engine.messages import (
    Assign,
    EngineLost,
    Finished,
    Hello,
    Journal,
    Message,
    Report,
    Shutdown,
    Started,
    decode_message,
    encode_message,
    pack_tokens,
    unpack_tokens,
)
from kvtransfer.engine.prefill import PrefillEngine
from kvtransfer.errors import Mismatch
from kvtransfer.models import load_model, namespace_of
from kvtransfer.models.runner import ATTENTION_NAME

T = TypeVar("T")


def one_shot(prompt: np.ndarray, count: int) -> list[int]:
    """Greedy tokens of transformers' own model without any cache."""
    model = load_model("tiny")
    module = load_reference()
    assert module is not model.module
    ids = prompt.astype(np.int64).tolist()
    for _ in range(count):
        with torch.inference_mode():
            logits = module(torch.tensor([ids]), logits_to_keep=1).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


_reference: list[torch.nn.Module] = []


def load_reference() -> torch.nn.Module:
    """A second copy of the tiny model: the engines' threads use the first."""
    if not _reference:
        load_model.cache_clear()
        model = load_model("tiny")
        model.use_attention("sdpa")
        _reference.append(model.module)
        load_model.cache_clear()
    return _reference[0]


class Stage:
    """Engines under a scheduler played by the test."""

    def __init__(self, store: Path, **changes: object) -> None:
        load_reference()
        model = load_model("tiny")
        model.use_attention(ATTENTION_NAME)
        fields: dict[str, object] = {
            "name": new_cluster_name(),
            "store": str(store),
            "namespace": namespace_of(model, 64).digest().hex(),
            "layer_planes": model.layer_planes,
            "pool_blocks": 24,
            "prefill_tokens": 1024,
            "decode_tokens": 2048,
            "deadline_s": 10.0,
            **changes,
        }
        self.config = ClusterConfig(**fields)  # type: ignore[arg-type]
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.config.scheduler_address)
        self.engines: dict[str, Engine] = {
            "pe0": PrefillEngine(self.config, "pe0"),
            "de0": DecodeEngine(self.config, "de0"),
        }
        self._threads = [threading.Thread(target=e.run) for e in self.engines.values()]
        for thread in self._threads:
            thread.start()
        for _ in self.engines:
            self.hear(Hello)
        self.reports: dict[str, Report] = {}

    def connect(self) -> None:
        self.tell("pe0", Started(prefill=["pe0"], decode=["de0"]))

    def tell(self, engine: str, message: Message) -> None:
        self._socket.send_multipart([engine.encode(), encode_message(message)])

    def assign(
        self,
        request: int,
        prompt: np.ndarray,
        path: str,
        *,
        generate: int = 4,
        life: int = 1,
        to: tuple[str, ...] = ("pe0", "de0"),
        **reads: int,
    ) -> None:
        for engine in to:
            self.tell(
                engine,
                Assign(
                    request_id=request,
                    life=life,
                    tokens=pack_tokens(prompt),
                    num_generate=generate,
                    prefill="pe0",
                    decode="de0",
                    read_path=path,
                    **reads,
                ),
            )

    def hear(self, kind: type[T], timeout_s: float = 20.0) -> T:
        """The next message of a kind; reports on the way are kept."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self._socket.poll(100):
                continue
            message = decode_message(self._socket.recv_multipart()[1])
            if isinstance(message, kind):
                return message
            if isinstance(message, Report):
                self.reports[message.engine] = message
                continue
            raise AssertionError(f"unexpected {message}")
        raise AssertionError(f"no {kind.__name__}")

    def serve(self, request: int, prompt: np.ndarray, path: str, **more: object) -> Finished:
        self.assign(request, prompt, path, **more)  # type: ignore[arg-type]
        return self.hear(Finished)

    def stop(self) -> dict[str, Journal]:
        journals = {}
        for engine in self.engines:
            self.tell(engine, Shutdown())
        for _ in self.engines:
            journal = self.hear(Journal)
            journals[journal.engine] = journal
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
        self._context.destroy(linger=0)
        for journal in journals.values():
            pool = journal.counters["pool"]
            assert pool["available"] == pool["slots"], "a slot was not given back"
            assert pool["bad_releases"] == 0
        return journals


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    stage.connect()
    yield stage
    stage.stop()


def prompt_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1024, count).astype(np.uint32)


def check(finished: Finished, prompt: np.ndarray, count: int = 4) -> None:
    assert finished.error == ""
    assert unpack_tokens(finished.tokens).tolist() == one_shot(prompt, count)


@pytest.mark.parametrize("path", ["pe", "de"])
def test_a_second_turn_hits_what_the_first_left(stage: Stage, path: str) -> None:
    prompt = prompt_of(200)
    first = stage.serve(1, prompt, path)
    check(first, prompt)
    assert first.stats is not None
    assert first.stats.hit_blocks == 0
    assert first.fresh_blocks == [True, True, True]
    longer = np.concatenate([prompt, unpack_tokens(first.tokens), prompt_of(70, 1)])
    second = stage.serve(2, longer, path)
    check(second, longer)
    assert second.stats is not None
    assert second.stats.hit_blocks == 3
    assert (
        second.stats.loaded_bytes + second.loaded_bytes == 3 * stage.config.layout.full_block_bytes
    )
    assert second.fresh_blocks[:3] == [False, False, False]


@pytest.mark.parametrize("path", ["pe", "de"])
def test_a_bad_block_costs_a_second_attempt_with_the_good_prefix(
    stage: Stage, tmp_path: Path, path: str
) -> None:
    prompt = prompt_of(400)
    stage.serve(1, prompt, path)
    files = {f.name.split("-")[1][:8]: f for f in tmp_path.rglob("*.kvb")}
    assert len(files) == 6
    victim = sorted(tmp_path.rglob("*.kvb"), key=lambda f: f.stat().st_mtime_ns)[0]
    keys = stage.engines["de0"].store.stats()
    assert keys["published"] == 6
    raw = bytearray(victim.read_bytes())
    raw[9000] ^= 4
    victim.write_bytes(raw)
    again = stage.serve(2, prompt, path)
    check(again, prompt)
    assert again.attempts == 2
    assert len(again.failures) == 1
    assert victim.name in again.failures[0]
    assert again.stats is not None
    assert again.stats.hit_blocks < 6
    third = stage.serve(3, prompt, path)  # the recomputed block took its place
    check(third, prompt)
    assert third.attempts == 1


@pytest.mark.parametrize("slow", ["pe0", "de0"])
def test_a_side_of_a_split_that_turns_slow_leaves_its_part_to_the_other(
    stage: Stage, slow: str
) -> None:
    prompt = prompt_of(800)
    stage.serve(1, prompt, "pe")
    block = stage.config.layout.full_block_bytes
    stage.engines[slow].traffic.set_cap("storage_read", block)
    again = stage.serve(2, prompt, "split", cached_tokens=12 * 64, decode_tokens=6 * 64)
    check(again, prompt)
    assert again.attempts == 2
    assert again.failures == [f"the {slow[:2].upper()} is slow to read its part of a split"]
    assert again.stats is not None
    assert again.stats.hit_blocks == 12
    loaded = {"pe0": again.stats.loaded_bytes, "de0": again.loaded_bytes}
    assert loaded.pop(slow) == 0
    assert list(loaded.values()) == [12 * block], "its own part once, and then the other's"
    stage.engines[slow].traffic.set_cap("storage_read", 0)
    third = stage.serve(3, prompt, "split", cached_tokens=12 * 64, decode_tokens=6 * 64)
    check(third, prompt)
    assert third.attempts == 1
    assert third.stats is not None
    assert third.stats.loaded_bytes == third.loaded_bytes == 6 * block


def test_without_another_attempt_a_slow_side_is_waited_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path, max_attempts=1)
    stage.connect()
    prompt = prompt_of(300)
    stage.serve(1, prompt, "pe")
    block = stage.config.layout.full_block_bytes
    stage.engines["pe0"].traffic.set_cap("storage_read", 2 * block)
    again = stage.serve(2, prompt, "split", cached_tokens=4 * 64, decode_tokens=2 * 64)
    check(again, prompt)
    assert again.attempts == 1
    assert again.loaded_bytes == 2 * block
    stage.stop()


@pytest.mark.parametrize("side", ["pe", "de"])
def test_reads_that_wait_for_a_buffer_are_reported_as_queued(tmp_path: Path, side: str) -> None:
    """Else a side whose buffers are full would look idle to the scheduler."""
    stage = Stage(tmp_path, pool_blocks=5)
    stage.connect()
    prompt = prompt_of(200)
    stage.serve(1, prompt, "pe")
    engine = f"{side}0"
    traffic = stage.engines[engine].traffic
    traffic.set_cap("storage_read", stage.config.layout.full_block_bytes)
    reads = {"cached_tokens": 192, "decode_tokens": 192 if side == "de" else 0}
    for request in (2, 3):
        stage.assign(request, prompt, side, **reads)
    while True:
        report = stage.hear(Report)
        if report.engine == engine and report.unfinished_requests == 2:
            break
    assert 192 < report.read_queue_tokens <= 2 * 192
    traffic.set_cap("storage_read", 0)
    for _ in range(2):
        check(stage.hear(Finished), prompt)
    while report.read_queue_tokens or report.engine != engine:
        report = stage.hear(Report)
    stage.stop()


def test_the_order_of_assignment_and_admission_does_not_matter(stage: Stage) -> None:
    prompt = prompt_of(100)
    stage.assign(1, prompt, "pe", to=("de0",))
    time.sleep(0.3)  # the DE's admission is at the PE before the assignment
    stage.assign(1, prompt, "pe", to=("pe0",))
    check(stage.hear(Finished), prompt)


def test_an_admission_waits_for_a_prefill_engine_that_connects_late(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    prompt = prompt_of(100)
    stage.assign(1, prompt, "pe")
    time.sleep(0.3)
    stage.connect()
    check(stage.hear(Finished), prompt)
    stage.stop()


def test_an_older_life_is_ignored_and_a_newer_one_replaces_it(stage: Stage) -> None:
    prompt, other = prompt_of(100), prompt_of(100, 5)
    stage.assign(1, other, "pe", life=2, to=("de0",))  # its PE never hears of it
    stage.assign(1, prompt, "pe", life=3)
    stage.assign(1, other, "pe", life=1)
    finished = stage.hear(Finished)
    assert finished.life == 3
    check(finished, prompt)


def test_requests_share_batches_and_each_gets_its_own_tokens(stage: Stage) -> None:
    prompts = {i: prompt_of(60 + 31 * i, i) for i in range(1, 6)}
    for request, prompt in prompts.items():
        stage.assign(request, prompt, "pe", generate=6)
    for _ in prompts:
        finished = stage.hear(Finished)
        check(finished, prompts[finished.request_id], 6)


def test_a_full_buffer_makes_requests_wait_their_turn(tmp_path: Path) -> None:
    stage = Stage(tmp_path, pool_blocks=5)
    stage.connect()
    prompts = {i: prompt_of(200, i) for i in range(1, 5)}  # four blocks each
    for request, prompt in prompts.items():
        stage.assign(request, prompt, "de", generate=3)
    order = [stage.hear(Finished) for _ in prompts]
    for finished in order:
        check(finished, prompts[finished.request_id], 3)
    assert [f.request_id for f in order] == [1, 2, 3, 4], "first come, first served"
    stage.stop()


def test_generated_blocks_are_persisted_as_they_fill(stage: Stage, tmp_path: Path) -> None:
    prompt = prompt_of(50)
    finished = stage.serve(1, prompt, "pe", generate=150)
    assert finished.fresh_blocks == [True, True, True]
    assert len(list(tmp_path.rglob("*.kvb"))) == 3
    whole = np.concatenate([prompt, unpack_tokens(finished.tokens)])
    again = stage.serve(2, whole, "de", generate=2)
    check(again, whole, 2)
    assert again.stats is not None
    assert again.stats.hit_blocks == 3


@pytest.mark.parametrize(
    ("changes", "length", "message"),
    [
        ({"pool_blocks": 2}, 300, "blocks of DE buffer"),
        ({"prefill_tokens": 128}, 300, "prefill device memory"),
    ],
)
def test_what_can_never_fit_is_an_error_and_the_next_request_is_served(
    tmp_path: Path, changes: dict[str, int], length: int, message: str
) -> None:
    stage = Stage(tmp_path, **changes)
    stage.connect()
    assert message in stage.serve(1, prompt_of(length), "pe").error
    small = prompt_of(90)
    check(stage.serve(2, small, "pe"), small)
    stage.stop()


def test_the_loss_of_the_other_side_frees_everything(stage: Stage) -> None:
    prompt = prompt_of(300)
    stage.serve(1, prompt, "pe")
    stage.assign(2, prompt, "pe", to=("de0",))  # admitted, its PE never starts
    stage.assign(3, prompt, "de", to=("pe0",))  # waits for an admission that never comes
    time.sleep(0.3)
    stage.tell("de0", EngineLost(engine="pe0", reason="test"))
    stage.tell("pe0", EngineLost(engine="de0", reason="test"))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        pools = [engine.pool for engine in stage.engines.values()]
        if all(pool.available == pool.num_slots for pool in pools):
            break
        time.sleep(0.05)
    assert all(pool.available == pool.num_slots for pool in pools)


def test_an_engine_with_another_model_refuses_to_start(tmp_path: Path) -> None:
    load_reference()
    model = load_model("tiny")
    config = ClusterConfig(
        name=new_cluster_name(),
        store=str(tmp_path),
        namespace="11" * 32,
        layer_planes=model.layer_planes,
    )
    with pytest.raises(Mismatch, match="not the cluster's"):
        PrefillEngine(config, "pe0")
