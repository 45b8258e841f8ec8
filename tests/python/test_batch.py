"""Prefill batches under the compute quota, and the fit of the time model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import InvalidArgument
from kvtransfer.scheduler import AttentionTimeModel, PrefillWork, attention_pairs, form_batch

works = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(1, 3000)), min_size=1, max_size=10
).map(lambda rows: [PrefillWork(i, c, n) for i, (c, n) in enumerate(rows)])


@given(works, st.floats(1e-4, 3.0), st.integers(1, 20_000))
def test_a_batch_keeps_the_quota_the_memory_and_the_order(
    queue: list[PrefillWork], quota: float, max_tokens: int
) -> None:
    model = AttentionTimeModel(1e-3, 1e-4, 1e-8)
    batch = form_batch(queue, model, quota, max_tokens)
    assert [b.request_id for b in batch] == list(range(len(batch)))
    assert sum(b.cached + b.new for b in batch) <= max_tokens
    for item, work in zip(batch, queue, strict=False):
        assert item.cached == work.cached
        assert 1 <= item.new <= work.remaining
        assert item.new == work.remaining or item is batch[-1], "only the last may be cut"
    step = max((model.increment(b.cached, 1) for b in batch), default=0)
    assert model.seconds([(b.cached, b.new) for b in batch]) <= max(quota, model.fixed_s + step) * (
        1 + 1e-9
    )
    if batch and batch[-1].new < queue[len(batch) - 1].remaining:
        cut = batch[-1]
        more = [(b.cached, b.new) for b in batch[:-1]] + [(cut.cached, cut.new + 1)]
        full = sum(c + n for c, n in more) > max_tokens
        assert full or model.seconds(more) > quota, "one token more must not have fitted"


def test_a_quota_below_one_token_still_makes_progress() -> None:
    batch = form_batch([PrefillWork(1, 100, 50)], AttentionTimeModel(1, 1, 1), 0.001, 10_000)
    assert [(b.request_id, b.new) for b in batch] == [(1, 1)]


def test_attention_pairs_is_the_sum_over_the_new_tokens() -> None:
    for cached, new in [(0, 1), (0, 7), (5, 3), (100, 40)]:
        assert attention_pairs(cached, new) == sum(cached + i + 1 for i in range(new))


@given(st.floats(0, 1e-2), st.floats(1e-6, 1e-3), st.floats(1e-10, 1e-7))
def test_the_fit_recovers_the_model_it_was_sampled_from(a: float, b: float, c: float) -> None:
    truth = AttentionTimeModel(a, b, c)
    shapes = [(0, 64), (0, 512), (1000, 64), (2000, 256), (4000, 16)]
    fit = AttentionTimeModel.fit([(k, n, truth.seconds([(k, n)])) for k, n in shapes])
    for cached, new in [(500, 100), (3000, 500)]:
        assert fit.seconds([(cached, new)]) == pytest.approx(
            truth.seconds([(cached, new)]), rel=1e-3
        )


def test_a_fit_has_no_negative_coefficient_and_needs_three_samples() -> None:
    fit = AttentionTimeModel.fit([(0, 10, 5.0), (0, 100, 4.0), (0, 1000, 3.0)])
    assert min(fit.fixed_s, fit.per_token_s, fit.per_pair_s) >= 0
    with pytest.raises(InvalidArgument, match="3 samples"):
        AttentionTimeModel.fit([(0, 1, 1.0)])
