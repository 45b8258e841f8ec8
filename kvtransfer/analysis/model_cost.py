"""What a token costs a model: KV bytes, and FLOPs from its public configuration.

A forward FLOP count has a part per new token (matrix products with the weights that a token meets)
and a part per new token and token of context (attention, a sparse model's indexer). KV bytes are what
a store keeps per token. Their quotient is the paper's cache-compute ratio (arXiv 2602.21548, Table 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.errors import InvalidArgument

__all__ = ["MODEL_COSTS", "ModelCost", "cache_compute_ratio"]


@dataclass(frozen=True)
class ModelCost:
    """Costs over all layers of one replica.

    ``flops_per_token``: per new token, whatever its context. ``flops_per_pair``: per new token and
    token of context. ``flops_per_selected``: the same for at most ``selected_tokens`` of the context
    (sparse top-k, sliding windows). ``kv_bytes_per_token``: what attention reads, as Table 1 counts it;
    ``index_bytes_per_token``: what a sparse model's indexer reads. Both are stored. ``weight_bytes``:
    read once per decode step. ``layers``: how finely a prefill can be overlapped with its loading.
    """

    name: str
    layers: int
    kv_bytes_per_token: int
    flops_per_token: float
    flops_per_pair: float
    flops_per_selected: float = 0.0
    selected_tokens: int = 0
    weight_bytes: float = 0.0
    index_bytes_per_token: int = 0

    @property
    def stored_bytes_per_token(self) -> int:
        return self.kv_bytes_per_token + self.index_bytes_per_token

    def forward_flops(self, cached: float, new: float) -> float:
        """Of ``new`` tokens behind ``cached`` ones; attention is counted over the context's mean."""
        context = cached + new / 2
        selected = min(context, self.selected_tokens)
        per_token = (
            self.flops_per_token
            + self.flops_per_pair * context
            + self.flops_per_selected * selected
        )
        return new * per_token


def cache_compute_ratio(model: ModelCost, append: int, context: int) -> float:
    """Bytes per FLOP: the KV of the whole context over the forward FLOPs of ``append`` tokens at its
    end. Times 1e6 it is the paper's GB per PFLOP."""
    if append < 1 or context < 1:
        raise InvalidArgument(f"append and context must be positive, got {append}, {context}")
    # The paper's figures fit attention over the full context for each appended token.
    return context * model.kv_bytes_per_token / model.forward_flops(context - append / 2, append)


@dataclass(frozen=True)
class _Attention:
    """Dimensions of one layer's attention and what its cache keeps, in elements."""

    projections: int  # weights a token meets
    score_and_value: int  # multiply-adds per pair of tokens


def _grouped(hidden: int, heads: int, kv_heads: int, head_dim: int) -> _Attention:
    """Grouped-query attention."""
    return _Attention(
        projections=hidden * head_dim * (2 * heads + 2 * kv_heads),
        score_and_value=2 * heads * head_dim,
    )


def _latent(hidden: int, heads: int, q_rank: int, kv_rank: int, nope: int, rope: int) -> _Attention:
    """Multi-head latent attention, absorbed: queries meet the latent itself (values of ``nope``)."""
    return _Attention(
        projections=hidden * q_rank
        + q_rank * heads * (nope + rope)
        + hidden * (kv_rank + rope)
        + 2 * kv_rank * heads * nope
        + heads * nope * hidden,
        score_and_value=heads * (2 * kv_rank + rope),
    )


def _mixture(hidden: int, inner: int, active: int, experts: int) -> int:
    """Weights of a mixture-of-experts layer that a token meets, its router among them."""
    return active * 3 * hidden * inner + hidden * experts


def _deepseek(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    q_rank: int,
    vocab: int,
    dense_layers: int,
    dense_inner: int,
    experts: int,
    active: int,
    shared: int,
    inner: int,
    index_heads: int = 0,
    index_dim: int = 0,
    top_k: int = 0,
) -> ModelCost:
    """DeepSeek V3 and its likes; with an indexer (V3.2) attention is over the ``top_k`` it selects."""
    attention = _latent(hidden, heads, q_rank, 512, 128, 64)
    indexer = q_rank * index_heads * index_dim + hidden * (index_dim + index_heads)
    moe = _mixture(hidden, inner, active + shared, experts)
    met = (
        layers * (attention.projections + (indexer if top_k else 0))
        + dense_layers * 3 * hidden * dense_inner
        + (layers - dense_layers) * moe
        + hidden * vocab
    )
    stored = met + (layers - dense_layers) * (experts - active) * 3 * hidden * inner
    dense = 2.0 * layers * attention.score_and_value
    return ModelCost(
        name=name,
        layers=layers,
        kv_bytes_per_token=layers * 656,  # 512 in FP8, their scales, 64 rotated ones in 16 bits
        flops_per_token=2.0 * met,
        flops_per_pair=2.0 * layers * index_heads * index_dim if top_k else dense,
        flops_per_selected=dense if top_k else 0.0,
        selected_tokens=top_k,
        weight_bytes=float(stored),  # FP8
        index_bytes_per_token=layers * (index_dim + 4) if top_k else 0,
    )


def _qwen25_32b() -> ModelCost:
    attention = _grouped(5120, 40, 8, 128)
    met = 64 * (attention.projections + 3 * 5120 * 27648) + 5120 * 152064
    return ModelCost(
        name="Qwen2.5-32B",
        layers=64,
        kv_bytes_per_token=64 * 2 * 8 * 128 * 2,
        flops_per_token=2.0 * met,
        flops_per_pair=2.0 * 64 * attention.score_and_value,
        weight_bytes=2.0 * met,
    )


def _gpt_oss_120b() -> ModelCost:
    attention = _grouped(2880, 64, 8, 64)
    layer = attention.projections + _mixture(2880, 2880, 4, 128)
    met = 36 * layer + 2880 * 201088
    full = windowed = 18  # every other layer sees the last 128 tokens only, whose KV is negligible
    return ModelCost(
        name="GPT-OSS-120B",
        layers=36,
        kv_bytes_per_token=full * 2 * 8 * 64,  # FP8
        flops_per_token=2.0 * met,
        flops_per_pair=2.0 * full * attention.score_and_value,
        flops_per_selected=2.0 * windowed * attention.score_and_value,
        selected_tokens=128,
        weight_bytes=(met + 36 * 124 * 3 * 2880 * 2880) / 2,  # MXFP4
    )


def _qwen3_235b() -> ModelCost:
    attention = _grouped(4096, 64, 4, 128)
    met = 94 * (attention.projections + _mixture(4096, 1536, 8, 128)) + 4096 * 151936
    return ModelCost(
        name="Qwen3-235B-A22B",
        layers=94,
        kv_bytes_per_token=94 * 2 * 4 * 128,  # FP8
        flops_per_token=2.0 * met,
        flops_per_pair=2.0 * 94 * attention.score_and_value,
        weight_bytes=float(met + 94 * 120 * 3 * 4096 * 1536),
    )


_V3 = {
    "layers": 61,
    "hidden": 7168,
    "heads": 128,
    "q_rank": 1536,
    "vocab": 129280,
    "dense_layers": 3,
    "dense_inner": 18432,
    "experts": 256,
    "active": 8,
    "shared": 1,
    "inner": 2048,
}

MODEL_COSTS: dict[str, ModelCost] = {
    "qwen2.5-32b": _qwen25_32b(),
    "gpt-oss-120b": _gpt_oss_120b(),
    "qwen3-235b": _qwen3_235b(),
    "deepseek-v3": _deepseek("DeepSeek-V3", **_V3),
    # The paper's DS-660B.
    "deepseek-v3.2": _deepseek("DeepSeek-V3.2", **_V3, index_heads=64, index_dim=128, top_k=2048),
    # The paper's DS-27B; what it doesn't say (latent ranks, vocabulary) is taken from V3.
    "ds-27b": _deepseek(
        "DS-27B",
        layers=30,
        hidden=2560,
        heads=32,
        q_rank=1536,
        vocab=129280,
        dense_layers=1,
        dense_inner=12288,
        experts=72,
        active=6,
        shared=2,
        inner=1536,
        index_heads=32,
        index_dim=64,
        top_k=1024,
    ),
}
