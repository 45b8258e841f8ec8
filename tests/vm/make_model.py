"""A model so small that an emulated machine computes with it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["save"]


def save(folder: Path) -> None:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1 << 16,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
