"""Weights of a sharded model to inference engines: see :class:`Publisher` and :class:`Receiver`."""

from polyshard_publish.errors import (
    CatalogueError,
    GoneError,
    ProofError,
    PublishError,
    VersionError,
)
from polyshard_publish.folder import FolderTarget, load_version
from polyshard_publish.pieces import Part
from polyshard_publish.publisher import Published, Publisher
from polyshard_publish.receiver import Receiver, ReceiverServer, Served
from polyshard_publish.targets import SocketTarget

__all__ = [
    "CatalogueError",
    "FolderTarget",
    "GoneError",
    "Part",
    "ProofError",
    "PublishError",
    "Published",
    "Publisher",
    "Receiver",
    "ReceiverServer",
    "Served",
    "SocketTarget",
    "VersionError",
    "load_version",
]
