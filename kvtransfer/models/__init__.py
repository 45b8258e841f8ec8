"""What the engines compute with: Hugging Face decoders over an arena of KV.

Needs the extra ``models`` (torch, transformers). Importing this package without them raises
:class:`~kvtransfer.errors.ModelError` with the command that installs them.
"""

from kvtransfer.errors import ModelError

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ModelError(
        f"the engines need torch and transformers ({error}): pip install 'kvtransfer[models]'"
    ) from error

from kvtransfer.models.arena import Arena, ArenaSpan
from kvtransfer.models.loader import Model, load_model, namespace_of
from kvtransfer.models.runner import BatchRunner, SequenceSlice

__all__ = [
    "Arena",
    "ArenaSpan",
    "BatchRunner",
    "Model",
    "SequenceSlice",
    "load_model",
    "namespace_of",
]
