"""The per-engine owner of every byte moved: storage, device copies and links to peers."""

from kvtransfer._core import IoBackend, Ticket, TrafficManager, probe_io

__all__ = ["IoBackend", "Ticket", "TrafficManager", "probe_io"]
