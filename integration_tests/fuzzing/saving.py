"""Ways to save and load a model, and ways to write into its parameters."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

Load = Callable[[], None]


def in_memory(model: nn.Module, folder: Path, ranks: Any) -> Load:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return lambda: _loaded(model.load_state_dict(state))


def torch_save(model: nn.Module, folder: Path, ranks: Any) -> Load:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)

    def load() -> None:
        file.seek(0)
        _loaded(model.load_state_dict(torch.load(file, weights_only=False)))

    return load


def deep_copy(model: nn.Module, folder: Path, ranks: Any) -> Load:
    state = copy.deepcopy(model.state_dict())
    return lambda: _loaded(model.load_state_dict(state))


def assigned(model: nn.Module, folder: Path, ranks: Any) -> Load:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return lambda: _loaded(model.load_state_dict(state, assign=True))


def checkpoint(model: nn.Module, folder: Path, ranks: Any) -> Load:
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, process_group=ranks)

    def load() -> None:
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder, process_group=ranks)
        _loaded(model.load_state_dict(state["model"]))

    return load


def full_state(model: nn.Module, folder: Path, ranks: Any) -> Load:
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    found: dict[str, Any] = get_model_state_dict(model, options=options)
    state = {name: value.clone() for name, value in found.items()}

    def load() -> None:
        set_model_state_dict(model, state, options=options)

    return load


def _loaded(problems: Any) -> None:
    assert not problems.missing_keys
    assert not problems.unexpected_keys


WAYS: dict[str, Callable[[nn.Module, Path, Any], Load]] = {
    "memory": in_memory,
    "torch.save": torch_save,
    "deepcopy": deep_copy,
    "assign": assigned,
    "dcp": checkpoint,
    "full": full_state,
}
"""Each saves, and returns what loads; ``"dcp"`` and ``"full"`` are collectives of ``ranks``."""


def _data(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.data.mul_(0.5)


def _local(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        inner: Any = parameter
        inner.to_local().detach().mul_(0.5)


def _foreach(parameters: list[Tensor]) -> None:
    torch._foreach_mul_(parameters, 0.5)


def _copy(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.copy_(parameter * 0.5)


WRITES: dict[str, Callable[[list[Tensor]], None]] = {
    "data": _data,
    "local": _local,
    "foreach": _foreach,
    "copy": _copy,
}
