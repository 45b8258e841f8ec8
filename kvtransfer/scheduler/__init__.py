"""The paper's scheduling policy (section 6): pure, deterministic, without I/O, clock or threads."""

from kvtransfer.scheduler.batch import (
    AttentionTimeModel,
    BatchItem,
    PrefillWork,
    attention_pairs,
    form_batch,
)
from kvtransfer.scheduler.decode import assign_decode, drain_global_queue
from kvtransfer.scheduler.policy import Scheduler
from kvtransfer.scheduler.prefill import assign_prefill
from kvtransfer.scheduler.read_path import choose_read_path
from kvtransfer.scheduler.types import Assignment, EngineReport, Limits, ReadPath, Request

__all__ = [
    "Assignment",
    "AttentionTimeModel",
    "BatchItem",
    "EngineReport",
    "Limits",
    "PrefillWork",
    "ReadPath",
    "Request",
    "Scheduler",
    "assign_decode",
    "assign_prefill",
    "attention_pairs",
    "choose_read_path",
    "drain_global_queue",
    "form_batch",
]
