"""How a forward meets its sequences: order of calls, errors, threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kvtransfer.engine.sequences import ResidentSequence
from kvtransfer.errors import KVTransferError
from kvtransfer.models import Model, SequenceSlice, load_model
from kvtransfer.models.runner import _attend, _current

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("tiny")


@dataclass
class Recorder:
    """A sequence that keeps everything and writes down what it was asked."""

    inner: ResidentSequence
    calls: list[tuple[str, int]] = field(default_factory=list)
    fail_at: int | None = None

    def store(self, layer: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if layer == self.fail_at:
            raise KVTransferError("the load failed")
        assert keys.shape == values.shape
        self.calls.append(("store", layer))
        self.inner.store(layer, first, keys, values)

    def view(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(("view", layer))
        return self.inner.view(layer, length)

    def attended(self, layer: int) -> None:
        self.calls.append(("attended", layer))


def recorder(model: Model, tokens: int = 64, fail_at: int | None = None) -> Recorder:
    arena = model.arena(model.num_layers, tokens)
    span = arena.allocate(tokens)
    assert span is not None
    return Recorder(ResidentSequence(arena, span), fail_at=fail_at)


def ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1024, count).astype(np.uint32)


def test_each_layer_is_stored_viewed_and_released_in_this_order(model: Model) -> None:
    sequence = recorder(model)
    model.runner().forward([SequenceSlice(sequence, 0, ids(10))])
    wanted = [
        (verb, layer) for layer in range(model.num_layers) for verb in ("store", "view", "attended")
    ]
    assert sequence.calls == wanted


def test_a_batch_goes_layer_by_layer_over_all_of_its_sequences(model: Model) -> None:
    order: list[tuple[int, int]] = []

    class Watched(Recorder):
        def store(self, layer: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            order.append((layer, id(self)))
            super().store(layer, first, keys, values)

    pair = [Watched(recorder(model).inner) for _ in range(2)]
    model.runner().forward([SequenceSlice(s, 0, ids(5 + i)) for i, s in enumerate(pair)])
    assert order == [(layer, id(s)) for layer in range(model.num_layers) for s in pair]


def test_an_error_in_a_sequence_ends_the_forward_and_the_next_one_is_fine(model: Model) -> None:
    bad, good = recorder(model, fail_at=4), recorder(model)
    runner = model.runner()
    with pytest.raises(KVTransferError, match="the load failed"):
        runner.forward([SequenceSlice(good, 0, ids(5)), SequenceSlice(bad, 0, ids(5))])
    assert max(layer for _, layer in bad.calls) == 3
    with pytest.raises(LookupError):
        _current.get()
    fresh, again = recorder(model), recorder(model)
    a = runner.forward([SequenceSlice(fresh, 0, ids(5))])
    b = runner.forward([SequenceSlice(again, 0, ids(5))])
    assert torch.equal(a, b)


def test_logits_are_float32_one_row_a_slice(model: Model) -> None:
    slices = [SequenceSlice(recorder(model), 0, ids(n)) for n in (1, 7, 3)]
    logits = model.runner().forward(slices)
    assert logits.shape == (3, model.vocab_size)
    assert logits.dtype == torch.float32


def test_two_threads_may_run_forwards_at_once(model: Model) -> None:
    """A PE's compute thread and a verifier share the model but not the batch."""
    wanted = {
        seed: model.runner().forward([SequenceSlice(recorder(model), 0, ids(40, seed))])
        for seed in (1, 2)
    }
    wrong = []

    def run(seed: int) -> None:
        for _ in range(5):
            got = model.runner().forward([SequenceSlice(recorder(model), 0, ids(40, seed))])
            if not torch.equal(got, wanted[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(("new", "total"), [(1, 1), (5, 5), (1, 9), (4, 9), (8, 9)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_is_causal_behind_any_prefix(new: int, total: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(new * 100 + total)
    heads, dim = 2, 8
    query = torch.randn(heads * groups, new, dim, generator=generator)
    keys = torch.randn(heads, total, dim, generator=generator)
    values = torch.randn(heads, total, dim, generator=generator)
    got = _attend(query, keys, values, None)
    for head in range(heads * groups):
        k, v = keys[head // groups], values[head // groups]
        for row in range(new):
            seen = total - new + row + 1
            weights = torch.softmax(k[:seen] @ query[head, row] / dim**0.5, dim=0)
            assert torch.allclose(got[head, row], weights @ v[:seen], atol=1e-5)
