"""Memory for a model on the meta device, when it is certain that all of it will get values."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard._torch.staged import checkpoint_name
from polyshard.errors import CheckpointError


def give_memory(model: nn.Module, filled: Collection[str]) -> None:
    """Have what is on the meta device rest in memory of this rank, with any values.

    Args:
        model: sharded or not.
        filled: names, as in state dicts, of what will get values.

    Raises:
        CheckpointError: when something on the meta device is not among them; nothing is changed.
    """
    vacant = {id(tensor): tensor for _, tensor in _named(model) if tensor.is_meta}
    if not vacant:
        return
    safe = {id(t) for name, t in _named(model) if checkpoint_name(model, name) in filled}
    left = [name for name, t in _named(model) if id(t) in vacant.keys() - safe]
    if left:
        raise CheckpointError(
            f"the model is on the meta device, and nothing would give values to {len(left)} of its "
            f"tensors, which no file holds: {', '.join(left[:5])}"
            f"{' and others' if len(left) > 5 else ''}. Compute them before it is loaded: make "
            "buffers outside of torch.device('meta'), or call model.to_empty(device=...) and "
            "initialise all of them."
        )
    held, device = _held(model), _device(model)
    model._apply(lambda tensor: _with_memory(tensor, device))
    # Outside of sharded modules that has made a parameter of its own of every name.
    for (first, key), *others in held:
        for registered, name in others:
            registered[name] = first[key]


def _held(model: nn.Module) -> list[list[tuple[dict[str, Any], str]]]:
    """Where modules hold each tensor that is on the meta device."""
    found: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for registered in (module._parameters, module._buffers):
            for name, tensor in registered.items():
                if tensor is not None and tensor.is_meta:
                    found.setdefault(id(tensor), []).append((registered, name))
    return list(found.values())


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _device(model: nn.Module) -> str:
    """Where shards of ``model`` are, which is where its buffers are needed."""
    kinds = (t.device_mesh.device_type for _, t in _named(model) if isinstance(t, DTensor))
    return next(kinds, "cpu")


def _with_memory(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
