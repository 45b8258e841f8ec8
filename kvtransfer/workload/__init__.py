"""Sessions to serve: trace readers, a generator fitted to the paper, statistics."""

from kvtransfer.workload.generator import TABLE_2, AgenticSpec, generate
from kvtransfer.workload.messages import read_messages
from kvtransfer.workload.sessions import Session, Turn, from_trace
from kvtransfer.workload.statistics import WorkloadStats, describe
from kvtransfer.workload.traces import TraceSession, TraceTurn, read_trace

__all__ = [
    "TABLE_2",
    "AgenticSpec",
    "Session",
    "TraceSession",
    "TraceTurn",
    "Turn",
    "WorkloadStats",
    "describe",
    "from_trace",
    "generate",
    "read_messages",
    "read_trace",
]
