"""The state of optimizers by the names of their parameters, in the form of torch's own helpers.

[Note: room for optimizer state]
torch's helpers give an optimizer without state some, by a step with a rate of 0, before they save
or load it. Such a step is not nothing: it counts, weight decay gets into the moments, and it is not
made where there are gradients. So state is saved as it is, which may be none; and what is loaded is
what the checkpoint has, whatever the optimizer held before. What a tensor is loaded into is placed
like the parameter if it has its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from polyshard._torch.staged import checkpoint_name
from polyshard.engine.state_dict import attach_optimizer
from polyshard.errors import CheckpointError

OPTIMIZER, STATE, GROUPS, PARAMS = "optimizer", "state", "param_groups", "params"
NUMBERS = frozenset(("step", "eta", "mu", "mu_product"))
"""State that torch's optimizers keep as plain numbers, also of a parameter without dims."""
MOST_ITEMS = 1_000_000
"""Of a list in a checkpoint, which may be anybody's."""
Groups = list[dict[str, Any]]


def optimizers_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """State and groups of all ``optimizers``; tensors are live.

    Raises:
        CheckpointError: when one has parameters that the model has not, or that another has too.
    """
    state: dict[str, Any] = {}
    groups: Groups = []
    for optimizer, names in _named(model, optimizers):
        found = optimizer.state_dict()
        for key, value in found[STATE].items():
            if not isinstance(key, int) or names[key] in state:
                raise CheckpointError(f"{_of(optimizer)} has state of {key}, which has no one name")
            _check_keys(names[key], value)
            state[names[key]] = value
        for group in found[GROUPS]:
            plain = {name: _plain(value) for name, value in group.items()}
            groups.append(plain | {PARAMS: [names[index] for index in group[PARAMS]]})
    return {STATE: state, GROUPS: groups}


def room_for_optimizers(
    metadata: Metadata, weights: Mapping[str, Any], names: frozenset[str]
) -> dict[str, Any]:
    """What to load the state of parameters with these ``names`` into, and all groups.

    Args:
        metadata: of the checkpoint.
        weights: the model's state dict, whose tensors say how state is placed.
        names: of the optimizers' parameters.
    """
    room: dict[str, Any] = {STATE: {}, GROUPS: []}
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    for key, saved in metadata.state_dict_metadata.items():
        path = paths.get(key, ())
        if len(path) < 4 or path[0] != OPTIMIZER or (path[1] == STATE and path[2] not in names):
            continue
        value = (
            _room(saved, weights.get(path[2]), path[3])
            if isinstance(saved, TensorStorageMetadata)
            else None
        )
        _put(room, path[1:], value)
    return room


def load_optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], loaded: Mapping[str, Any]
) -> None:
    """Fill ``optimizers`` from what was loaded into :func:`room_for_optimizers`.

    Raises:
        CheckpointError: when the parameters of one group were in several, or in none.
    """
    for optimizer, names in _named(model, optimizers):
        own = optimizer.state_dict()[GROUPS]
        groups = [
            {**group, **_group_of(optimizer, index, [names[i] for i in group[PARAMS]], loaded)}
            | {PARAMS: group[PARAMS]}
            for index, group in enumerate(own)
        ]
        state = {i: loaded[STATE][name] for i, name in names.items() if name in loaded[STATE]}
        optimizer.load_state_dict({STATE: state, GROUPS: groups})
        _put_numbers(optimizer, state)


def _put_numbers(optimizer: Optimizer, saved: Mapping[int, Any]) -> None:
    """Numbers in the dtype they were saved in: torch rounds all but ``step`` to the parameter's."""
    parameters = [p for group in optimizer.param_groups for p in group[PARAMS]]
    for place, values in saved.items():
        held = optimizer.state[parameters[place]]
        for name in NUMBERS & values.keys() & held.keys():
            value, found = values[name], held[name]
            if (
                isinstance(value, Tensor)
                and isinstance(found, Tensor)
                and found.dtype != value.dtype
            ):
                held[name] = value.to(found.device, copy=True)


def parameter_names(model: nn.Module, optimizers: Sequence[Optimizer]) -> frozenset[str]:
    """Of the parameters of all ``optimizers``."""
    return frozenset(name for _, names in _named(model, optimizers) for name in names.values())


def _named(
    model: nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[Optimizer, dict[int, str]]]:
    """Each optimizer with the names of its parameters, by their places in its groups."""
    known = {id(p): checkpoint_name(model, name) for name, p in model.named_parameters()}
    for optimizer in optimizers:
        attach_optimizer(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group[PARAMS]]
        if alien := [tuple(p.shape) for p in parameters if id(p) not in known]:
            raise CheckpointError(
                f"{_of(optimizer)} has a parameter of shape {alien[0]} that is not one of the model"
            )
        yield optimizer, {place: known[id(p)] for place, p in enumerate(parameters)}


def _group_of(
    optimizer: Optimizer, index: int, names: Sequence[str], loaded: Mapping[str, Any]
) -> dict[str, Any]:
    """The saved group that has these parameters; nothing for a group that has none."""
    found = [group for group in loaded[GROUPS] if set(names) & set(group[PARAMS])]
    if len(found) > 1 or (names and not (found and set(names) <= set(found[0][PARAMS]))):
        where = "in several groups" if len(found) > 1 else "not all in a group"
        raise CheckpointError(
            f"parameters of param group {index} of {_of(optimizer)} were {where} when they were "
            "saved. Group them as they were"
        )
    return found[0] if found else {}


def _room(saved: TensorStorageMetadata, like: object, name: object) -> Tensor:
    """Memory for the tensor ``name`` of the state of the parameter that is saved as ``like``."""
    dtype = saved.properties.dtype
    is_number = not saved.size and name in NUMBERS
    if isinstance(like, Tensor) and saved.size == like.shape and not is_number:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    if isinstance(like, DTensor) and saved.size:  # as what is computed from all of it
        whole = [Replicate()] * like.device_mesh.ndim
        made: Tensor = empty_dtensor(
            saved.size, dtype=dtype, device_mesh=like.device_mesh, placements=whole
        )
        return made
    return torch.empty(saved.size, dtype=dtype, device="cpu")


def _put(root: dict[str, Any], path: Sequence[str | int], value: Any) -> None:
    """Set what is at ``path`` of nested dicts (under texts) and lists (under numbers)."""
    at: Any = root
    for step, following in zip(path, [*path[1:], None], strict=True):
        inner = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(step, int):  # ranks share the work of saving, so items come in any order
            if not 0 <= step < MOST_ITEMS:
                raise CheckpointError(f"it has a list of {step:,} items")
            at.extend([None] * (step + 1 - len(at)))
            at[step] = inner if at[step] is None else at[step]
        else:
            at.setdefault(step, inner)
        at = at[step]


def _check_keys(name: str, state: object) -> None:
    """Refuse what would come back under other keys: torch makes texts of them all."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            if not isinstance(key, str):
                raise CheckpointError(f"optimizer state of '{name}' has the key {key!r}: no text")
            _check_keys(name, value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            _check_keys(name, value)


def _plain(value: Any) -> Any:
    """Without numpy's scalars, which a schedule leaves behind that computes with numpy."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(_plain(one) for one in value)
    return value


def _of(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
