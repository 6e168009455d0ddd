"""A trainer that is restarted publishes to a vLLM that runs on, with modules in place of vLLM's."""

from __future__ import annotations

import importlib
import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from polyshard_publish import FolderTarget, Publisher, SocketTarget, engines, load_version

TOKEN = "t"


class Base:
    """Of engines, and of what they are told."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def __class_getitem__(cls, item: object) -> type:
        return cls


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, with the names that it takes from vLLM."""
    names = {
        "vllm": (),
        "vllm.distributed": (),
        "vllm.distributed.weight_transfer": (),
        "vllm.distributed.weight_transfer.base": (
            *("ParamMeta", "TrainerInitInfo", "TrainerWeightTransferEngine", "WeightSource"),
            *("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo"),
        ),
        "vllm.distributed.weight_transfer.factory": (
            *("WeightTransferEngineFactory", "WeightTransferTrainerFactory"),
        ),
        "vllm.model_executor": (),
        "vllm.model_executor.model_loader": (),
        "vllm.model_executor.model_loader.reload": (
            *("finalize_layerwise_reload", "initialize_layerwise_reload"),
        ),
    }
    for name, members in names.items():
        made: Any = ModuleType(name)
        made.__dict__.update(dict.fromkeys(members, Base))
        monkeypatch.setitem(sys.modules, name, made)
    name = "polyshard_publish.engines.vllm"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(engines, "vllm", None, raising=False)
    del sys.modules[name]  # to be imported anew, and after the test
    return importlib.import_module(name)


class Client:
    """What vLLM's trainers talk to: passes on to one worker, which loads nothing."""

    def __init__(self, ours: Any, worker: Any) -> None:
        self._ours, self._worker = ours, worker

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._worker.init_transfer_engine(self._ours.InitInfo(**init_info))

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, int]) -> None:
        self._worker.updated = update_info["version"]

    def finish_weight_update(self, weight_version: str) -> None: ...


def test_a_trainer_that_is_restarted(ours: Any, tmp_path: Path) -> None:
    """Its versions come after those in a folder that it publishes to as well."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    worker = ours.PolyshardEngine(parallel_config=SimpleNamespace(rank=0))
    client = Client(ours, worker)
    version = 0
    for _ in range(2):
        targets = [SocketTarget(f"127.0.0.1:{port}", token=TOKEN), FolderTarget(tmp_path)]
        publisher = Publisher(nn.Linear(4, 3), to=targets)
        info = SimpleNamespace(
            publisher=publisher, port=port, host="127.0.0.1", token=TOKEN, is_sender=True
        )
        trainer = ours.PolyshardTrainer.trainer_init(info, client=client)
        for _ in range(2):
            version += 1
            trainer.send_weights()
            with worker._server.receiver.serving() as served:
                assert served.version == worker.updated == version
            assert load_version(tmp_path).version == version
    worker.shutdown()
