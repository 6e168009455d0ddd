"""The way over gloo: connections of the engine's own, and messages from shard to region.

A reader who wants NCCL needs nothing of this room.
"""

from polyshard.transport.gloo.owners import GlooOwner
from polyshard.transport.gloo.point_to_point import GlooReduce, GlooTransport

__all__ = ["GlooOwner", "GlooReduce", "GlooTransport"]
