"""vLLM's weight transfer, 0.32 and 0.33: a source, and engines of our own for both sides.

``register()`` in the process of the trainer and in that of each worker makes
``WeightTransferConfig(backend="polyshard")`` known. A worker then has a
:class:`~polyshard_publish.Receiver` with a copy of the weights on its host, which is what patches
change; all of it is loaded into the model by vLLM's own layerwise reload. The versions differ in
what a source is: 0.32 calls ``metadata()`` and iterates, 0.33 reads ``metadata`` and calls
``iter_full()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from typing_extensions import override
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from polyshard_publish.publisher import Published, Publisher
from polyshard_publish.receiver import Receiver, ReceiverServer

BACKEND = "polyshard"
WAIT_SECONDS = 300.0


def register() -> None:
    """Make both engines known to vLLM; harmless the second time."""
    for factory, engine in (
        (WeightTransferEngineFactory, PolyshardEngine),
        (WeightTransferTrainerFactory, PolyshardTrainer),
    ):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, engine)


class PublisherSource(WeightSource):
    """For vLLM's own backends (NCCL, IPC): whole tensors one at a time, in the receiver's form."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def _metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, entry.torch_dtype, entry.shape)
            for name, entry in self._publisher.catalogue.items()
        ]

    metadata = cached_property(_metadata) if hasattr(WeightSource, "iter_full") else _metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._publisher.tensors()

    iter_full = __iter__


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where workers listen: each at ``port`` plus its rank among those of the engine."""

    port: int
    host: str = "127.0.0.1"
    token: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which version a worker is to load."""

    version: int


class PolyshardEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """A worker's side."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _server: ReceiverServer | None = None

    @override
    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()  # of a trainer that was restarted
        port = init_info.port + self.parallel_config.rank
        self._server = ReceiverServer(Receiver(), init_info.host, port, token=init_info.token)

    @override
    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    @override
    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self._server is None:
            raise RuntimeError("call init_weight_transfer_engine() first")
        receiver = self._server.receiver
        receiver.wait(update_info.version, WAIT_SECONDS)
        with receiver.serving() as served:
            self.model.load_weights(iter(served.tensors.items()))

    @override
    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    @override
    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    @override
    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


@dataclass
class PolyshardTrainerInitInfo(TrainerInitInfo):
    """How the trainer reaches the workers, and what it publishes with."""

    backend: ClassVar[str] = BACKEND
    publisher: Publisher
    port: int
    host: str = "127.0.0.1"
    token: str = ""


class PolyshardTrainer(TrainerWeightTransferEngine[PolyshardTrainerInitInfo]):
    """The trainer's side: every rank publishes its own parts, rank 0 talks to vLLM."""

    init_info_cls = PolyshardTrainerInitInfo
    _publisher: Publisher
    _version: int | None = None

    @override
    @classmethod
    def trainer_init(
        cls, init_info: PolyshardTrainerInitInfo, *, client: Any, source: Any = None
    ) -> PolyshardTrainer:
        made = cls(client=client, source=source, is_sender=init_info.is_sender)
        made._publisher = init_info.publisher
        if made.is_sender:
            client.init_weight_transfer_engine(
                {"port": init_info.port, "host": init_info.host, "token": init_info.token}
            )
        return made

    @override
    def send_weights(self) -> Published:
        """Publish the next version, and have vLLM load it. Workers are left alone if it fails."""
        if self._version is None:  # a trainer before this one may have published
            served = self._publisher.served().values()
            self._version = max(version or 0 for version in served)
        self._version += 1
        published = self._publisher.publish(self._version)
        if self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights({"version": self._version})
            self.client.finish_weight_update(str(self._version))
        return published
