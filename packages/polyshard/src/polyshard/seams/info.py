"""What a plugin may know of parameters and groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


@dataclass(frozen=True)
class ParamInfo:
    """What a plugin may know of one parameter; immutable and equal on every rank.

    ``fqn`` is relative to the unit that owns it. ``shape`` is the full shape in elements,
    ``dtype`` the original dtype, ``module_class`` the class of the module that registers it.
    ``placements`` are those of a parameter that came as a ``DTensor`` (on its own mesh), else
    ``None``. ``shard_dim`` is the tensor dim that is sharded over ``mesh``, of what
    ``pre_flatten_transform`` made of it; ``None`` while that is not settled, and for parameters
    kept whole. ``reduce_dtype`` is what the policy says, ``None`` where it says nothing.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    mesh: DeviceMesh
    module_class: type[nn.Module]
    placements: tuple[Placement, ...] | None = None
    shard_dim: int | None = None
    reduce_dtype: torch.dtype | None = None
    facts: tuple[str, ...] = ()
    """What plugins say of it (``polyshard_parameter_facts``)."""
    part_shape: tuple[int, ...] | None = None
    """Of what is sharded over ``mesh``, if that is the parameter itself, or this rank's part of it
    as a ``DTensor``, element by element; ``None`` where plugins made something else of it."""


class GroupIdentity:
    """One parameter group for as long as it lives: what to key by where names will not do.

    Names repeat between models, and a plugin object may serve several. Hashable, and may be
    referred to weakly.
    """


@dataclass(frozen=True)
class GroupInfo:
    """What a plugin may know of a parameter group while its plan is built.

    ``name`` is unique in a model, and changes when the root names its units; ``identity`` is the
    same object in every info of one group, and of no other. ``rank`` and ``world_size`` are those
    of the shard axis. ``param_dtype`` is the dtype of the unsharded parameters, ``reduce_dtype``
    that of the gradient reduction.
    """

    name: str
    parameters: tuple[ParamInfo, ...]
    mesh: DeviceMesh
    rank: int
    world_size: int
    device: torch.device
    orig_dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    identity: GroupIdentity = field(default_factory=GroupIdentity, compare=False, repr=False)
