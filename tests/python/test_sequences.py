"""The rotation of layer slots on a prefill device, with the test as the transfers."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from kvtransfer.engine.sequences import ResidentSequence, StreamedSequence
from kvtransfer.errors import KVTransferError, TransferTimeout
from kvtransfer.models import Arena
from kvtransfer.stream import LayerStream

LAYERS, SLOTS, HEADS, DIM = 7, 3, 2, 4


def make(sources: int = 1, timeout_s: float = 5.0) -> StreamedSequence:
    arena = Arena(SLOTS, HEADS, DIM, torch.float32, 64)
    span = arena.allocate(40)
    assert span is not None
    return StreamedSequence(
        arena,
        span,
        ready=LayerStream(LAYERS, sources),
        computed=LayerStream(LAYERS, 1),
        released=LayerStream(LAYERS, 2),
        deadline=time.monotonic() + timeout_s,
    )


def kv(layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.full((HEADS, count, DIM), float(layer + 1))
    return keys, -keys


def test_new_kv_lands_behind_the_staged_prefix_in_the_layer_s_slot() -> None:
    sequence = make()
    for layer in range(SLOTS):
        staged = torch.full((HEADS, 10, DIM), 100.0 + layer)
        sequence.arena.write(layer % SLOTS, sequence.span, 0, staged, staged)
        sequence.ready.arrive(layer)
        sequence.store(layer, 10, *kv(layer, 5))
        keys, values = sequence.view(layer, 15)
        assert keys.shape == (HEADS, 15, DIM)
        assert keys[0, :10].unique().tolist() == [100.0 + layer]
        assert keys[1, 10:].unique().tolist() == [layer + 1.0]
        assert values[1, 10:].unique().tolist() == [-(layer + 1.0)]


def test_publishing_comes_after_everything_of_the_layer_is_there() -> None:
    sequence = make(sources=2)
    thread = threading.Thread(target=sequence.store, args=(0, 0, *kv(0, 5)))
    thread.start()
    sequence.ready.arrive(0)
    time.sleep(0.05)
    assert not sequence.computed.ready(0), "one of two sources is not enough"
    sequence.ready.arrive(0)
    thread.join(5)
    assert sequence.computed.ready(0)


def test_a_slot_is_written_again_only_after_push_and_attention_have_left_it() -> None:
    sequence = make(sources=0)
    for layer in range(SLOTS):
        sequence.store(layer, 0, *kv(layer, 5))
    finished = threading.Event()

    def fourth() -> None:
        sequence.store(SLOTS, 0, *kv(SLOTS, 5))
        finished.set()

    thread = threading.Thread(target=fourth)
    thread.start()
    assert not finished.wait(0.05)
    sequence.attended(0)
    assert not finished.wait(0.05), "the push of layer 0 may still read it"
    assert sequence.view(0, 5)[0].unique().tolist() == [1.0]
    sequence.released.arrive(0)  # what the push does when its requests have retired
    assert finished.wait(5)
    thread.join()
    assert sequence.view(SLOTS, 5)[0].unique().tolist() == [SLOTS + 1.0]


def test_a_whole_forward_walks_through_three_slots() -> None:
    sequence = make(sources=1)

    def transfers() -> None:
        for layer in range(LAYERS):
            if layer >= SLOTS:
                sequence.released.wait(layer - SLOTS, 5)
            sequence.ready.arrive(layer)
            sequence.computed.wait(layer, 5)
            sequence.released.arrive(layer)

    thread = threading.Thread(target=transfers)
    thread.start()
    for layer in range(LAYERS):
        sequence.store(layer, 0, *kv(layer, 8))
        assert sequence.view(layer, 8)[0].unique().tolist() == [layer + 1.0]
        sequence.attended(layer)
    thread.join(5)
    assert len(sequence.waits) == LAYERS
    assert all(end >= begin for begin, end in sequence.waits)


def test_a_failed_load_reaches_the_forward_as_its_own_error() -> None:
    sequence = make()
    sequence.ready.fail("block 3 of 9 is bad")
    with pytest.raises(KVTransferError, match="block 3 of 9"):
        sequence.store(0, 0, *kv(0, 5))
    assert not sequence.computed.ready(0)


def test_a_layer_that_never_comes_ends_at_the_deadline() -> None:
    sequence = make(timeout_s=0.1)
    begin = time.monotonic()
    with pytest.raises(TransferTimeout):
        sequence.store(0, 0, *kv(0, 5))
    assert time.monotonic() - begin < 5


def test_a_resident_sequence_keeps_every_layer() -> None:
    arena = Arena(LAYERS, HEADS, DIM, torch.float32, 64)
    span = arena.allocate(20)
    assert span is not None
    sequence = ResidentSequence(arena, span)
    for layer in range(LAYERS):
        sequence.store(layer, 0, *kv(layer, 12))
        sequence.attended(layer)
    for layer in range(LAYERS):
        keys, values = sequence.view(layer, 12)
        assert keys.unique().tolist() == [layer + 1.0]
        assert values.unique().tolist() == [-(layer + 1.0)]
