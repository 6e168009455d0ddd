"""Sums over the replicate axis: the second hop of a reduction, on a mesh that has one.

[Note: replicas]
Other links carry it than what the shard axis needs next, so where the device has streams it
follows the reduce-scatter on a lane of its own and runs beside the computation, up to the end of
the backward: what the reduce-scatter read is free before. Two things keep it on the current stream,
when the reduction is finished: a codec, whose working memory belongs to that stream, and a transfer
that gives its memory up as soon as it was waited for (see ``Pending``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from polyshard.exchange.accumulation import Sums
from polyshard.exchange.flight import InFlight
from polyshard.memory.streams import Lanes, Passage, streams_of
from polyshard.plugins.validation import wordless
from polyshard.seams import BoundReplicaCodec, ShardStorage, overrides
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport.base import all_gather, all_reduce, outlives_wait


class Watch(Protocol):
    """Hears of staging and of sums over replicas; times are the host's, in seconds."""

    def staged(self, direction: str, num_bytes: int, seconds: float) -> None:
        """A shard came from where it rests (``fetch``), or a gradient went there (``place``)."""
        ...

    def replicas_summed(self, payload_bytes: int, seconds: float) -> None:
        """Gradients were summed over replicas."""
        ...


def placing_in(storage: ShardStorage, watch: Watch | None) -> Callable[[Tensor], Tensor]:
    """The storage's ``place_gradient``, timed where somebody asks and there is something to do."""
    if watch is None or not overrides(storage.place_gradient, ShardStorage.place_gradient):
        return storage.place_gradient

    def place(gradient: Tensor) -> Tensor:
        begin = time.perf_counter()
        placed = storage.place_gradient(gradient)
        watch.staged("place", gradient.nbytes, time.perf_counter() - begin)
        return placed

    return place


class Replicas:
    """Sums the shards of one group over its replicas. See [Note: replicas]."""

    def __init__(self, roles: MeshRoles, lanes: Lanes, watch: Watch | None = None) -> None:
        """``lanes`` are those of the root; ``watch`` hears of each sum."""
        self._watch = watch
        self._roles = roles
        self._lanes = lanes
        self._follows = roles.is_replicated and streams_of(roles.device) is not None

    def follow(self, flight: InFlight, partial: Sums) -> None:
        """Have the sum be part of what ``flight`` waits for, where it may; takes ``partial``."""
        total = flight.total
        follows = self._follows and flight.sums_replicas and outlives_wait(flight.pending)
        if not follows or total is None:
            return
        earlier = None
        if partial:
            earlier, present = partial.take()
            flight.present = sorted({*present, *flight.present})
        lane = self._lanes.replicas(total.device)
        scattered = flight.pending
        with lane.enter():
            scattered.wait()
            if earlier is not None:
                total.add_(earlier)
            self.sum(total, None)
        # Another kind may be waited for only once.
        flight.sent = scattered if isinstance(scattered, Passage) else None
        flight.pending = lane.leave((None if flight.sent else scattered, total, earlier))
        flight.is_summed = True

    def sum(self, total: Tensor, codec: BoundReplicaCodec | None) -> None:
        """Sum ``total`` in place, on the current stream."""
        if self._watch is None:
            self._sum(total, codec)
            return
        begin = time.perf_counter()
        payload_bytes = self._sum(total, codec)
        self._watch.replicas_summed(payload_bytes, time.perf_counter() - begin)

    def _sum(self, total: Tensor, codec: BoundReplicaCodec | None) -> int:
        """The bytes that stand for ``total`` on the wire."""
        groups = self._roles.replicate_groups
        if codec is None or len(groups) != 1:
            self._all_reduce(total)
            return total.nbytes
        payload = total.new_empty(codec.payload_bytes, dtype=torch.uint8)
        payloads = payload.new_empty(self._roles.replicate_size, codec.payload_bytes)
        wordless(cast("Any", codec).encode(total, payload), codec, "encode")
        all_gather(payloads, payload, groups[0])
        wordless(cast("Any", codec).decode_sum(payloads, total), codec, "decode_sum")
        return payload.nbytes

    def _all_reduce(self, total: Tensor) -> None:
        for group in self._roles.replicate_groups:
            all_reduce(total, group)
