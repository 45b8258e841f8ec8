"""What FP8 storage does to a model's predictions, and to the bytes of its blocks.

Computes the KV of a context, takes it through a store as it is and as FP8 (a scale per token and
head), continues with further tokens of the text, and compares the logits of those.

    python bench/bench_fp8.py --model smollm2 --context 2048 --tokens 256
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvtransfer import BlockStore, make_pool
from kvtransfer.keys import chain_keys
from kvtransfer.models import Model, load_model, namespace_of

BLOCK_TOKENS = 64
TEXTS = ("README.md", "docs/*.md", "docs/decisions/*.md")


def token_ids(model: Model, count: int) -> torch.Tensor:
    """English (the documents of this project) for a model with a tokenizer, else random tokens."""
    tokenizer = model.tokenizer()
    if tokenizer is None:
        return torch.from_numpy(np.random.default_rng(1).integers(0, model.vocab_size, count))
    root = Path(__file__).parents[1]
    files = [file for pattern in TEXTS for file in sorted(root.glob(pattern))]
    ids = tokenizer("\n".join(file.read_text() for file in files))["input_ids"]
    if len(ids) < count:
        raise SystemExit(f"the documents have {len(ids)} tokens, fewer than the {count} asked for")
    return torch.tensor(ids[:count])


def through_store(
    model: Model, ids: torch.Tensor, kv: torch.Tensor, folder: str, encoding: str
) -> tuple[torch.Tensor, int]:
    """KV ``[L, 2, H, T, D]`` written to a store and read back, and the bytes of a block's file."""
    layout = model.layout(BLOCK_TOKENS)
    root = namespace_of(model, BLOCK_TOKENS).digest()
    group = 0 if encoding == "raw" else model.head_dim
    store = BlockStore(folder, root, layout, encoding=encoding, encoding_group=group)
    keys = chain_keys(root, ids.numpy().astype(np.uint32), BLOCK_TOKENS)
    pool = make_pool(layout, len(keys))
    slots = pool.acquire(len(keys))
    assert slots is not None
    memory = pool.region.array()
    payload = layout.full_block_bytes
    back = torch.empty_like(kv)
    starts = [int(start) for start in pool.payload_offsets(slots)]
    places = [slice(start, start + payload) for start in starts]
    for i, place in enumerate(places):
        block = kv[:, :, :, i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS].contiguous()
        memory[place] = block.view(torch.uint8).numpy().reshape(-1)
    assert store.put(keys, root, pool, slots) == len(keys)
    for place in places:
        memory[place] = 0
    assert store.get(keys, root, pool, slots) == len(keys)
    for i, place in enumerate(places):
        block = torch.from_numpy(memory[place].copy()).view(kv.dtype)
        at = slice(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)
        back[:, :, :, at] = block.view(back[:, :, :, at].shape)
    return back, store.file_bytes


def logits_after(model: Model, kv: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``[len(ids), vocab]`` in float32, of tokens that follow a context with this KV."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(kv):
        cache.update(keys[None].clone(), values[None].clone(), layer)
    module: Any = model.module
    logits: torch.Tensor = module(ids[None], past_key_values=cache, use_cache=True).logits[0]
    return logits.float()


@torch.inference_mode()
def measure(name: str, context: int, tokens: int) -> dict[str, float]:
    model = load_model(name, "bfloat16")
    model.use_attention("sdpa")
    module: Any = model.module
    ids = token_ids(model, context + tokens)
    past = module(ids[None, :context], use_cache=True).past_key_values
    kv = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in past.layers])
    with tempfile.TemporaryDirectory() as folder:
        as_is, raw_bytes = through_store(model, ids[:context], kv, f"{folder}/raw", "raw")
        fp8, fp8_bytes = through_store(model, ids[:context], kv, f"{folder}/8", "fp8_of_bfloat16")
    assert torch.equal(as_is, kv)
    raw = logits_after(model, as_is, ids[context:])
    encoded = logits_after(model, fp8, ids[context:])
    p, q = raw.log_softmax(-1), encoded.log_softmax(-1)
    following = ids[context + 1 :]
    rows = torch.arange(len(following))
    kl = (p.exp() * (p - q)).sum(-1)
    difference = (kv.float() - fp8.float()).norm() / kv.float().norm()
    return {
        "context": context,
        "tokens": tokens,
        "file_bytes": fp8_bytes / raw_bytes,
        "kv_relative_rms_error": float(difference),
        "same_top_token": float((raw.argmax(-1) == encoded.argmax(-1)).float().mean()),
        "mean_kl_nats": float(kl.mean()),
        "max_kl_nats": float(kl.max()),
        "rms_logit_error": float((raw - encoded).pow(2).mean().sqrt()),
        "rms_logit": float((raw - raw.mean(-1, keepdim=True)).pow(2).mean().sqrt()),
        "loss_raw_nats": float(-p[rows, following].mean()),
        "loss_fp8_nats": float(-q[rows, following].mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=2048, help="a multiple of 64 tokens")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.model, options.context, options.tokens)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:24} {value:.5g}")


if __name__ == "__main__":
    main()
