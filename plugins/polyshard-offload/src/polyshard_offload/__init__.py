"""Parameters, gradients and optimizer state on the host or on disk: a plugin for polyshard."""

from polyshard_offload.__about__ import __version__
from polyshard_offload.errors import CorruptedError, OffloadError, StorageError
from polyshard_offload.plugin import Offload, cpu_offload
from polyshard_offload.report import Memory
from polyshard_offload.settings import DiskSettings, Tier

__all__ = [
    "CorruptedError",
    "DiskSettings",
    "Memory",
    "Offload",
    "OffloadError",
    "StorageError",
    "Tier",
    "__version__",
    "cpu_offload",
]
