"""The models' forward against transformers' own, and the arena."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from kvtransfer.engine.sequences import ResidentSequence
from kvtransfer.errors import InvalidArgument, ModelError
from kvtransfer.models import Arena, SequenceSlice, load_model, namespace_of
from kvtransfer.models.arena import PAGE_TOKENS
from kvtransfer.models.runner import ATTENTION_NAME

torch.set_num_threads(1)


def sequence(arena: Arena, tokens: int) -> ResidentSequence:
    span = arena.allocate(tokens)
    assert span is not None
    return ResidentSequence(arena, span)


def ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1024, count).astype(np.uint32)


def one_shot(model: object, tokens: np.ndarray) -> torch.Tensor:
    model.use_attention("sdpa")
    with torch.inference_mode():
        logits = model.module(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1]
    model.use_attention(ATTENTION_NAME)
    return logits.float()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_split_of_a_prompt_gives_the_logits_of_the_whole(dtype: str) -> None:
    model = load_model("tiny", dtype)
    arena = model.arena(model.num_layers, 1024)
    tokens = ids(200)
    wanted = one_shot(model, tokens)
    runner = model.runner()
    tolerance = 1e-4 if dtype == "float32" else 0.05
    for cuts in ([200], [64, 200], [1, 2, 3, 200], [199, 200], [50, 100, 150, 200]):
        seq = sequence(arena, 200)
        first = 0
        for end in cuts:
            logits = runner.forward([SequenceSlice(seq, first, tokens[first:end])])
            first = end
        assert torch.allclose(logits[0], wanted, atol=tolerance), cuts
        assert int(logits[0].argmax()) == int(wanted.argmax())
        arena.free(seq.span)


def test_a_batch_of_sequences_gives_each_its_own_logits() -> None:
    model = load_model("tiny")
    arena = model.arena(model.num_layers, 1024)
    runner = model.runner()
    prompts = [ids(n, seed=n) for n in (5, 130, 64)]
    slices = [SequenceSlice(sequence(arena, len(p)), 0, p) for p in prompts]
    logits = runner.forward(slices)
    for row, prompt in zip(logits, prompts, strict=True):
        assert torch.allclose(row, one_shot(model, prompt), atol=1e-4)


def test_the_same_forward_is_bitwise_the_same_wherever_its_kv_lies() -> None:
    model = load_model("tiny")
    runner = model.runner()
    tokens = ids(150)
    seen = []
    for capacity, before in ((512, 0), (2048, 320)):
        arena = model.arena(model.num_layers, capacity)
        if before:
            arena.allocate(before)
        seq = sequence(arena, 150)
        runner.forward([SequenceSlice(seq, 0, tokens[:128])])
        seen.append(runner.forward([SequenceSlice(seq, 128, tokens[128:])]))
    assert torch.equal(*seen)


def test_the_tiny_model_is_the_same_in_every_load() -> None:
    a = load_model("tiny")
    load_model.cache_clear()
    b = load_model("tiny")
    assert a is not b
    for x, y in zip(a.module.parameters(), b.module.parameters(), strict=True):
        assert torch.equal(x, y)
    assert namespace_of(a, 64).digest() == namespace_of(b, 64).digest()
    assert namespace_of(a, 64).digest() != namespace_of(load_model("tiny", "bfloat16"), 64).digest()


def test_unknown_models_and_dtypes_are_errors() -> None:
    with pytest.raises(ModelError, match="unknown model 'gpt-9'"):
        load_model("gpt-9")
    with pytest.raises(ModelError, match="dtype"):
        load_model("tiny", "int4")
    with pytest.raises(ModelError, match="no model"):
        load_model("/proc/self")


def test_a_local_folder_without_a_tokenizer_serves_ids_and_refuses_text(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert (model.num_layers, model.num_heads, model.vocab_size) == (2, 1, 64)
    with pytest.raises(ModelError, match="holds no tokenizer"):
        model.tokenizer()
    assert load_model("tiny").tokenizer() is None


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=60))
def test_arena_spans_never_overlap_and_freeing_restores_everything(
    script: list[tuple[bool, int]],
) -> None:
    arena = Arena(1, 1, 8, torch.float32, 1024)
    held = []
    for take, value in script:
        if take:
            span = arena.allocate(value)
            if span is None:
                assert arena.free_tokens < -(-value // PAGE_TOKENS) * PAGE_TOKENS
            else:
                assert span.capacity >= value
                held.append(span)
        elif held:
            arena.free(held.pop(value % len(held)))
        pages = [p for span in held for p in span.pages.tolist()]
        assert len(pages) == len(set(pages))
        assert all(0 <= p < 1024 // PAGE_TOKENS for p in pages)
    for span in held:
        arena.free(span)
    assert arena.free_tokens == 1024


def test_freeing_twice_is_an_error() -> None:
    arena = Arena(1, 1, 8, torch.float32, 64)
    span = arena.allocate(20)
    assert span is not None
    arena.free(span)
    with pytest.raises(InvalidArgument, match="free already"):
        arena.free(span)
