"""Encodes a shard into the payload that is sent, on the device where the shard is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from polyshard.memory.streams import launched
from polyshard.plugins.validation import wordless
from polyshard.seams import BoundGatherCodec


class PayloadWriter(Protocol):
    """Fills the payload of one group."""

    def write(self) -> None:
        """Encode the shard."""
        ...


class NearWriter:
    """The shard is read where the payload is sent from."""

    def __init__(self, codec: BoundGatherCodec, shard: Tensor, payload: Tensor) -> None:
        """``shard`` is ``[shard_numel]``, ``payload`` ``[payload_bytes]`` ``uint8``."""
        self._codec: Any = codec  # its answer is looked at, though it should have none
        self._shard = shard
        self._payload = payload

    def write(self) -> None:
        """Encode straight into the payload."""
        wordless(self._codec.encode(self._shard, self._payload), self._codec, "encode")


class CrossingWriter:
    """The shard stays on the host: what moves to the accelerator is the payload."""

    def __init__(self, codec: BoundGatherCodec, shard: Tensor, payload: Tensor) -> None:
        """Page-locked memory for one payload, so that its copy runs beside other work."""
        self._codec: Any = codec
        self._shard = shard
        self._payload = payload
        self._encoded = torch.empty(
            payload.numel(), dtype=torch.uint8, pin_memory=True, device="cpu"
        )
        self._copied: Callable[[], None] | None = None

    def write(self) -> None:
        """Encode on the host, after the last copy has read what was encoded before; copy."""
        if self._copied is not None:
            self._copied()
        wordless(self._codec.encode(self._shard, self._encoded), self._codec, "encode")
        self._payload.copy_(self._encoded, non_blocking=True)
        self._copied = launched(self._payload.device)


def payload_writer(codec: BoundGatherCodec, shard: Tensor, payload: Tensor) -> PayloadWriter:
    """A writer for tensors on these devices."""
    if shard.device.type == payload.device.type:
        return NearWriter(codec, shard, payload)
    return CrossingWriter(codec, shard, payload)
