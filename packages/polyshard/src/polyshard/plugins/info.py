"""What a plugin may know of parameters and groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from polyshard.plugins.base import Named

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

    from polyshard.sharding.mesh import MeshRoles
    from polyshard.transport.base import Transport


class CollectivesBackend(Named, ABC):
    """Decides how bytes move. Exclusive per group."""

    @abstractmethod
    def connect(self, roles: MeshRoles, device: torch.device) -> Transport:
        """A transport between the ranks of the shard axis."""


class ShardingConstraint(Named, ABC):
    """Says which elements of a parameter must not be separated."""

    @abstractmethod
    def block_elements(self, param: ParamInfo) -> int:
        """Contiguous elements that must stay on one rank; 1 when anything goes."""


class StateDictAdapter(Named, ABC):
    """Keeps checkpoints native when a plugin changes what a parameter looks like."""

    @abstractmethod
    def on_save(self, param: ParamInfo, value: Any) -> Any:
        """The value to store under the parameter's original name."""

    @abstractmethod
    def on_load(self, param: ParamInfo, value: Any) -> Any:
        """The value to load into the parameter."""

    def on_save_state(self, param: ParamInfo, name: str, value: Any) -> Any:
        """The value to store for optimizer state ``name`` of the parameter's shape.

        Right as it is for an adapter that moves elements. One that changes values overrides this
        and :meth:`on_load_state`; else its state is saved as the plugin sees it, with a warning.
        """
        del name
        return self.on_save(param, value)

    def on_load_state(self, param: ParamInfo, name: str, value: Any) -> Any:
        """The value to load into optimizer state ``name``."""
        del name
        return self.on_load(param, value)


class ParameterTransform(Protocol):
    """One layer of the onion around a parameter (see ``pre_flatten_transform`` in the hookspecs).

    The engine makes these of a plugin's two hooks, so plugins never write one. Flattening runs in
    plugin order, unflattening in reverse. Both run outside autograd: the outermost unflattened
    tensor becomes the autograd leaf, and its gradient is flattened again before it is reduced.
    """

    @property
    def name(self) -> str:
        """Name of the plugin."""
        ...

    def flatten(self, tensor: Tensor, param: ParamInfo | None) -> tuple[Tensor, Any | None]:
        """The tensor to shard in place of ``tensor``, and what :meth:`unflatten` will need.

        ``None`` as the second answer says "not mine": the tensor must come back unchanged.
        """
        ...

    def unflatten(self, tensor: Tensor, param_extension: Any, param: ParamInfo | None) -> Tensor:
        """Undo :meth:`flatten` on the unsharded tensor. The result must alias ``tensor``."""
        ...


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
