"""BatchRunner: one forward of a Hugging Face decoder over slices of several sequences.

The slices' tokens are packed into one row, so that the linear layers run over the whole batch layer
by layer; attention runs per sequence over its own KV. The model is unchanged: it is given a ``Cache``
whose ``update(layer)`` is where KV is waited for, stored and published, and an attention function
(transformers' attention interface) that reads the KV from where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache

__all__ = ["ATTENTION_NAME", "BatchRunner", "KVSequence", "SequenceSlice"]

ATTENTION_NAME = "kvtransfer"


class KVSequence(Protocol):
    """The KV of one sequence, as a forward pass meets it, layer by layer."""

    def store(self, layer: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes new KV ``[H, n, D]`` of tokens [first, first + n). May block until earlier KV of the
        layer is there; raises what the transfer failed with."""

    def view(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[H, length, D]``."""

    def attended(self, layer: int) -> None:
        """The layer's attention is done: its KV may leave the device."""


@dataclass(frozen=True)
class SequenceSlice:
    """Tokens ``ids`` of a sequence, at positions [first, first + len(ids))."""

    sequence: KVSequence
    first: int
    ids: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class _Batch:
    slices: Sequence[SequenceSlice]

    def spans(self) -> list[tuple[SequenceSlice, slice]]:
        out, at = [], 0
        for piece in self.slices:
            out.append((piece, slice(at, at + len(piece.ids))))
            at += len(piece.ids)
        return out


_current: ContextVar[_Batch] = ContextVar("kvtransfer_batch")


class _LayerwiseCache(Cache):  # type: ignore[misc]
    """Hands each layer's new KV to the sequences of the current batch."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for piece, at in _current.get().spans():
            piece.sequence.store(
                layer_idx, piece.first, key_states[0, :, at], value_states[0, :, at]
            )
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Causal attention of the last ``n`` of ``T`` positions: [Hq, n, D] x [H, T, D] -> [Hq, n, D]."""
    n, total = query.shape[1], keys.shape[1]
    mask = None
    if n > 1 and n < total:
        rows = torch.arange(total - n, total).unsqueeze(1)
        mask = torch.arange(total).unsqueeze(0) <= rows
    return scaled_dot_product_attention(
        query.unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=n > 1 and n == total,
        scale=scaling,
        enable_gqa=query.shape[0] != keys.shape[0],
    )[0]


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, Hq, tokens, D] -> [1, tokens, Hq, D]."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    parts = []
    for piece, at in _current.get().spans():
        keys, values = piece.sequence.view(layer, piece.first + len(piece.ids))
        parts.append(_attend(query[0, :, at], keys, values, scaling))
        piece.sequence.attended(layer)
    return torch.cat(parts, dim=1).transpose(0, 1).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)


class BatchRunner:
    """Drives one model. ``module`` must have been switched to :data:`ATTENTION_NAME`."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    @torch.inference_mode()
    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Logits ``[len(slices), vocab]`` (float32) after each slice's last token."""
        ids = np.concatenate([piece.ids for piece in slices]).astype(np.int64)
        positions = np.concatenate(
            [np.arange(piece.first, piece.first + len(piece.ids)) for piece in slices]
        )
        last = np.cumsum([len(piece.ids) for piece in slices]) - 1
        token = _current.set(_Batch(slices))
        try:
            output = self._module(
                input_ids=torch.from_numpy(ids).unsqueeze(0),
                position_ids=torch.from_numpy(positions).unsqueeze(0),
                cache=_LayerwiseCache(),
                use_cache=True,
                logits_to_keep=torch.from_numpy(last),
            )
        finally:
            _current.reset(token)
        logits: torch.Tensor = output.logits[0].float()
        return logits
