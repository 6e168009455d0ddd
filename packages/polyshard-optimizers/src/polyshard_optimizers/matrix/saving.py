"""State between owners and checkpoints, which have it as an optimizer on shards would.

What has the shape of the parameter is saved in its rows. Anything else (a preconditioner, a count)
is saved as it is where updates are made, and told to all ranks for that: that of several ranks is
joined in the order of the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard.plugins.seams import local_of
from polyshard_optimizers.matrix.choosing import Cut
from polyshard_optimizers.matrix.recipes import State
from polyshard_optimizers.matrix.sites import Site

_Told = dict[int, dict[int, State]]
"""State of each parameter, by the first block that it is of."""


@dataclass(frozen=True)
class Saved:
    """Where updates of one parameter are made, and state of that."""

    site: Site
    state: State


@dataclass(frozen=True)
class _Rows:
    """Stands for state that travels by rows."""

    dtype: torch.dtype


@dataclass(frozen=True)
class _OnDevice:
    """Stands for a tensor on the device, whose number differs from rank to rank."""

    value: Tensor


def to_saved(every: Sequence[Saved]) -> list[State]:
    """State of every parameter, on all ranks."""
    told: _Told = {}
    for place, one in enumerate(every):
        if one.site.makes:
            state = {name: _told(value, one.site.cut) for name, value in one.state.items()}
            told[place] = {one.site.first: state}
    told = _from_all(told, every)
    found: list[State] = []
    for place, one in enumerate(every):
        by_block, saved = told.get(place, {}), {}
        parts = [by_block[first] for first in sorted(by_block)]
        for name in parts[0] if parts else ():
            values = [part[name] for part in parts]
            if isinstance(values[0], _Rows):
                whole = one.state[name] if one.site.makes else None
                rows = one.site.scatter(whole, values[0].dtype)()
                saved[name] = _like(one.site.parameter, rows)
            else:
                device = one.site.parameter.device
                saved[name] = _alone(_in_order([_heard(value, device) for value in values]))
        found.append(saved)
    return found


def from_saved(site: Site, cut: Cut, state: Mapping[str, Any]) -> State:
    """State of what this rank makes updates of; ``cut`` is that of the whole parameter."""
    found: State = {}
    for name, value in state.items():
        whole: Any
        if isinstance(value, DTensor) and value.shape == site.parameter.shape:
            whole = site.gather(local_of(value))
            if whole is not None and site.makes:
                whole = whole.reshape(site.cut.count, *site.cut.shape)
        else:
            alike = value.full_tensor() if isinstance(value, DTensor) else value
            stop = site.first + site.cut.count
            whole = _every(alike, cut, site)[site.first : stop] if site.makes else None
        if site.makes:
            found[name] = whole.clone() if isinstance(whole, Tensor) else whole
    return found


def _told(value: Any, cut: Cut) -> Any:
    if isinstance(value, Tensor) and value.shape == (cut.count, *cut.shape):
        return _Rows(value.dtype)
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return _OnDevice(value.cpu())
    return value


def _heard(value: Any, device: torch.device) -> Any:
    return value.value.to(device) if isinstance(value, _OnDevice) else value


def _in_order(values: Sequence[Any]) -> Any:
    """State of all blocks, of parts of them in their order."""
    if all(isinstance(value, Tensor) for value in values):
        return torch.cat(list(values))
    return [one for value in values for one in value]


def _alone(values: Any) -> Any:
    """State of one matrix as its optimizer has it; that of several as it is."""
    return values[0] if len(values) == 1 else values


def _every(value: Any, cut: Cut, site: Site) -> Any:
    """What :func:`_alone` was given."""
    if isinstance(value, Tensor) and value.shape == site.parameter.shape:
        return value.reshape(cut.count, *cut.shape)
    if cut.count > 1:
        return value
    return value.unsqueeze(0) if isinstance(value, Tensor) else [value]


def _like(parameter: Tensor, rows: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return rows.clone()
    made: Tensor = DTensor.from_local(
        rows.clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return made


def _from_all(told: _Told, every: Sequence[Saved]) -> _Told:
    """What any rank of the meshes has told, by place and block."""
    parameters = [one.site.parameter for one in every]
    meshes = {i: p.device_mesh for i, p in enumerate(parameters) if isinstance(p, DTensor)}
    for mesh in dict.fromkeys(meshes.values()):
        # Other ranks may have other parameters in a place: experts on a mesh of their own.
        places = [place for place, own in meshes.items() if own == mesh]
        for axis in range(mesh.ndim):
            if mesh.size(axis) == 1:
                continue
            own = {place: told[place] for place in places if place in told}
            heard: list[Any] = [None] * mesh.size(axis)
            dist.all_gather_object(heard, own, group=mesh.get_group(axis))
            for one in heard:
                for place, by_block in one.items():
                    told[place] = told.get(place, {}) | by_block
    return told
