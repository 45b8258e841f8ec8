"""The paper's scheduling policy (section 6): pure, deterministic, without I/O, clock or threads."""

from kvtransfer.scheduler.baselines import Balance
from kvtransfer.scheduler.batch import (
    AttentionTimeModel,
    BatchItem,
    PrefillWork,
    attention_pairs,
    form_batch,
)
from kvtransfer.scheduler.decode import DecodeGroups, assign_decode
from kvtransfer.scheduler.policy import PathPolicy, Scheduler
from kvtransfer.scheduler.prefill import PrefillEngines
from kvtransfer.scheduler.read_path import Progress, choose_side, split_decode_tokens, takes_over
from kvtransfer.scheduler.types import (
    Assignment,
    Disk,
    EngineLoad,
    EngineReport,
    Limits,
    ReadPath,
    Request,
)

__all__ = [
    "Assignment",
    "AttentionTimeModel",
    "Balance",
    "BatchItem",
    "DecodeGroups",
    "Disk",
    "EngineLoad",
    "EngineReport",
    "Limits",
    "PathPolicy",
    "PrefillEngines",
    "PrefillWork",
    "Progress",
    "ReadPath",
    "Request",
    "Scheduler",
    "assign_decode",
    "attention_pairs",
    "choose_side",
    "form_batch",
    "split_decode_tokens",
    "takes_over",
]
