"""The prefill and decode loops, their messages, the scheduler process and the launcher."""

from kvtransfer.engine.config import ClusterConfig
from kvtransfer.engine.messages import Result

__all__ = ["ClusterConfig", "Result"]
