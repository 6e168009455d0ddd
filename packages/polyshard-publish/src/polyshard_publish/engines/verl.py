"""verl's ``CheckpointEngine`` (0.9), registered as ``polyshard``.

Rollout workers have a :class:`~polyshard_publish.Receiver` each, whose address ``build_topology``
tells the actors. An actor gives its engine the model once (``attach``): what verl passes to
``send_weights`` is a generator that gathers whole tensors, and is left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from polyshard_publish.errors import PublishError
from polyshard_publish.publisher import Publisher
from polyshard_publish.receiver import Receiver, ReceiverServer

WAIT_SECONDS = 300.0


@CheckpointEngineRegistry.register("polyshard")
class PolyshardCheckpointEngine(CheckpointEngine):
    """Both sides; which one an instance is, ``init_process_group`` says."""

    _version = 0
    _server: ReceiverServer | None = None
    _publisher: Publisher | None = None
    _model: nn.Module | None = None
    _settings: Mapping[str, Any]
    _addresses: list[str] | None = None

    def __init__(self, bucket_size: int = 0, host: str = "127.0.0.1", **unused: Any) -> None:
        """As verl makes it, with the address that actors reach this worker at; packs no buckets."""
        del bucket_size, unused
        self._host = host

    def attach(self, model: nn.Module, **settings: Any) -> None:
        """Say what an actor publishes; ``settings`` are a :class:`Publisher`'s, besides ``to``."""
        self._model, self._settings = model, settings

    @override
    def prepare(self) -> dict[str, Any]:
        if self._model is not None:
            return {"address": None}
        if self._server is None:
            self._server = ReceiverServer(Receiver(), self._host)
        return {"address": self._server.address}

    @override
    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        addresses = [one["address"] for one in metadata if one["address"] is not None]
        return (
            {"addresses": [addresses] * actor_wg_world_size},
            {"addresses": [[]] * rollout_world_size},
        )

    @override
    def init_process_group(self, addresses: list[str]) -> None:
        if not addresses or addresses == self._addresses:
            return  # a rollout's; or versions that receivers have can be patched
        if self._model is None:
            raise PublishError("attach(model) first: the actor's engine does not know its model.")
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = Publisher(self._model, to=addresses, **self._settings)
        self._addresses = addresses

    @override
    def finalize(self) -> None:
        """Keep what was prepared: the next version is a patch of this one."""

    @override
    async def send_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None] | None = None,
        global_steps: int | None = None,
    ) -> None:
        if self._publisher is None:
            raise PublishError("init_process_group() first: there are no receivers.")
        self._version = self._version + 1 if global_steps is None else global_steps
        await asyncio.to_thread(self._publisher.publish, self._version)

    @override
    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        if self._server is None:
            raise PublishError("prepare() first: nothing listens.")
        wanted = self._version + 1 if global_steps is None else global_steps
        receiver = self._server.receiver
        self._version = await asyncio.to_thread(receiver.wait, wanted, WAIT_SECONDS)
        with receiver.serving() as served:
            for name, tensor in served.tensors.items():
                yield name, tensor
