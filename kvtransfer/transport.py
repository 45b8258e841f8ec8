"""The per-engine owner of every byte moved: storage, device copies and links to peers.

:class:`TrafficManager` is what an engine uses. Below it, for engines that bring their own control
channel: :class:`VerbsDomain` (a device with registered regions), :class:`VerbsEndpoint` (queue pairs
and the blob that describes them) and :class:`WorkRing` (the doorbell-batched ring over one link).
"""

from kvtransfer._core import (
    IoBackend,
    Ticket,
    TrafficManager,
    VerbsDomain,
    VerbsEndpoint,
    VerbsOptions,
    WorkRing,
    io_features,
    make_null_ring,
    make_shm_ring,
    probe_io,
    verbs_devices,
)

__all__ = [
    "IoBackend",
    "Ticket",
    "TrafficManager",
    "VerbsDomain",
    "VerbsEndpoint",
    "VerbsOptions",
    "WorkRing",
    "io_features",
    "make_null_ring",
    "make_shm_ring",
    "probe_io",
    "verbs_devices",
]
