"""One parameter of a group: where modules register it, and its sharded form.

[Note: three forms]
*Sharded parameter*: a ``DTensor`` parameter whose local tensor rests in the group's shard buffer
(see [Note: own storage]); what the optimizer, the state dict and the user see between steps.
*Unsharded parameter*: a plain leaf over the group's unsharded buffer; what forward and backward
compute with. *Sharded gradient*: a ``DTensor`` like the sharded parameter. Registering one form or
the other with the modules is a dictionary write, prepared once.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from typing_extensions import override

from polyshard._torch.newer import grad_dtype_of, set_grad_dtype
from polyshard._torch.private import dtensor_spec, wrap_local, wrap_parameter
from polyshard.plugins.transforms import Extensions
from polyshard.policies import MixedPrecisionPolicy
from polyshard.sharding.layout import ParameterShape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from polyshard.plugins.seams import ParamInfo
    from polyshard.sharding.mesh import MeshRoles
    from polyshard.sharding.placement import Placed


@dataclass(frozen=True)
class Told:
    """That a parameter says itself of which dtype its gradients are; ``None`` is any."""

    dtype: torch.dtype | None

    @override
    def __str__(self) -> str:
        """For people, and for ranks to compare."""
        return "of any dtype" if self.dtype is None else str(self.dtype).removeprefix("torch.")

    @classmethod
    def by(cls, parameter: Tensor) -> Told | None:
        """What ``parameter`` says, if anything."""
        is_told, dtype = grad_dtype_of(parameter)
        return cls(dtype) if is_told else None


@dataclass(frozen=True)
class Owner:
    """A module that registers a parameter, and the name it uses."""

    module: nn.Module
    name: str

    @property
    def held(self) -> nn.Parameter | None:
        """What the module holds under the name now."""
        return self.module._parameters.get(self.name)


@dataclass(frozen=True)
class Registration:
    """Everything needed to put one form of a parameter where a module looks it up."""

    owner: Owner
    value: nn.Parameter

    def apply(self) -> None:
        """Through ``setattr``, for modules that watch their attributes (``nn.RNNBase``)."""
        setattr(self.owner.module, self.owner.name, self.value)


class Registry:
    """One form of all parameters of a group, registered with one call."""

    def __init__(self, forms: Iterable[tuple[Sequence[Owner], nn.Parameter]]) -> None:
        """Resolve each module's way of registering once."""
        self._slots: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        self._watched: list[Registration] = []
        for owners, value in forms:
            for owner in owners:
                if type(owner.module).__setattr__ is nn.Module.__setattr__:
                    self._slots.append((owner.module._parameters, owner.name, value))
                else:
                    self._watched.append(Registration(owner, value))

    def register(self, run: object = None) -> None:
        """Make this form the one that modules hold; an operation, of any ``run``."""
        del run
        for parameters, name, value in self._slots:
            parameters[name] = value
        for registration in self._watched:
            registration.apply()


def placements_for(dim: int | None, roles: MeshRoles) -> tuple[Placement, ...]:
    """Placements of a sharded parameter on the data-parallel mesh."""
    placements: list[Placement] = [Replicate()] * roles.mesh.ndim
    if dim is not None and roles.shard_axis is not None:
        placements[roles.shard_axis] = Shard(dim)
    return tuple(placements)


@dataclass(frozen=True)
class Form:
    """What the sharded parameter is as a ``DTensor``: its mesh, placements and global shape."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    @classmethod
    def of(cls, placed: Placed, shape: torch.Size) -> Form:
        """Sharded over the data-parallel mesh alone."""
        return cls(placed.roles.mesh, placements_for(placed.dim, placed.roles), shape)

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Mesh, placements, shape and dtype of the sharded form, as a ``DTensor`` keeps them."""
        return dtensor_spec(self.mesh, self.placements, self.shape, dtype)


@dataclass(frozen=True)
class Source:
    """A parameter as found on the module, before sharding.

    ``value`` is what is sharded: the parameter's data, unless plugins flattened it into something
    else; ``extensions`` is what they need to undo that.
    """

    info: ParamInfo
    parameter: nn.Parameter
    owners: tuple[Owner, ...]
    placed: Placed
    value: Tensor
    extensions: Extensions = ()
    form: Form | None = None
    """What a plugin makes of the sharded parameter, where it takes part in other axes too."""
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    """That of the unit, with what it overrides for this parameter settled."""

    @property
    def shape(self) -> ParameterShape:
        """What the layout needs of it."""
        return ParameterShape(self.info.fqn, tuple(self.value.shape), self.placed.dim)


def _has_plain_state(parameter: nn.Parameter) -> bool:
    """Whether its attributes are a user's (a scale, say), and not what a tensor is made of."""
    is_wrapper = hasattr(parameter, "__tensor_flatten__") or isinstance(parameter, DTensor)
    return nn.Parameter in type(parameter).__mro__ and not is_wrapper


class ShardedParameter:
    """The sharded form of one parameter, and what makes more ``DTensor`` s like it."""

    def __init__(self, source: Source, local: Tensor) -> None:
        """``local`` is the part of the shard buffer that holds this rank's rows."""
        self.info = source.info
        self.owners = source.owners
        self.dim = source.placed.dim
        self.extensions = source.extensions
        self._form = source.form or Form.of(source.placed, source.value.shape)
        self.spec = self._form.spec(local.dtype)
        self.parameter = wrap_parameter(
            local, self.spec, requires_grad=source.parameter.requires_grad
        )
        if _has_plain_state(source.parameter):
            self.parameter.__dict__.update(source.parameter.__dict__)
        self._specs = {local.dtype: self.spec}
        self.told = Told.by(source.parameter)
        self._tell()

    def _tell(self) -> None:
        if self.told is not None and Told.by(self.parameter) != self.told:
            set_grad_dtype(self.parameter, self.told.dtype)

    def hear(self) -> None:
        """Take note of what the parameter was told of its gradients since."""
        self.told = Told.by(self.parameter) or self.told

    def tell_again(self) -> None:
        """Objects that replace others come without, and so do those whose content was swapped."""
        self.hear()
        self._tell()

    def lift_gradient(self) -> Tensor | None:
        """Take the gradient away if it has a dtype of its own, which no conversion changes."""
        self.hear()
        gradient = self.parameter.grad
        if self.told is None or gradient is None:
            return None
        self.parameter.grad = None
        return gradient

    def put_gradient(self, gradient: Tensor) -> None:
        """Give what :meth:`lift_gradient` took to the parameter that is registered now."""
        held = self.owners[0].held
        if held is not None and self.told is not None:
            set_grad_dtype(held, self.told.dtype)
            held.grad = gradient.to(held.device).requires_grad_(gradient.requires_grad)

    @property
    def current_info(self) -> ParamInfo:
        """``info``, with what ``requires_grad`` says now."""
        wanted = self.parameter.requires_grad
        if self.info.requires_grad is wanted:
            return self.info
        return replace(self.info, requires_grad=wanted)

    def adopt(self, parameter: nn.Parameter) -> None:
        """Take over a parameter object that replaced ours (``to_empty``, ``assign=True``)."""
        self.hear()
        self.parameter = parameter
        self.tell_again()
        self.spec = self._form.spec(parameter.dtype)
        self._specs = {parameter.dtype: self.spec}

    def wrap(self, local: Tensor) -> DTensor:
        """A gradient (or any value) with this parameter's placements."""
        spec = self._specs.get(local.dtype)
        if spec is None:
            spec = self._specs[local.dtype] = self._form.spec(local.dtype)
        return wrap_local(local, spec)


# [Note: from leaf to shard]
# Modules may hold an unsharded leaf after a backward (one that does not reshard, or an evaluation
# since), and what they list has no gradient then: that of the sharded parameter has it. So a leaf
# knows its sharded parameter, by an attribute. A weak reference to a leaf would do without one,
# but torch swaps no tensor that has any. The attribute may be copied to other tensors with what
# users keep on a parameter, so it says whose it is.
_SHARD = "_polyshard_shard"


class _Origin:
    """The sharded parameter of the leaf with this identity."""

    def __init__(self, leaf: Tensor, sharded: ShardedParameter) -> None:
        self.leaf, self.sharded = id(leaf), weakref.ref(sharded)

    @override
    def __reduce__(self) -> tuple[type[OrderedDict[str, object]], tuple[()]]:
        """A leaf that is saved loads without it: as a class that loading weights permits."""
        return OrderedDict, ()


def note_origin(leaf: nn.Parameter, sharded: ShardedParameter) -> None:
    """Have :func:`at_rest` find ``sharded`` for its unsharded form."""
    leaf.__dict__[_SHARD] = _Origin(leaf, sharded)


def at_rest(tensor: Tensor) -> Tensor:
    """The sharded parameter of an unsharded leaf; others are returned. See the note above."""
    origin = tensor.__dict__.get(_SHARD)
    if not isinstance(origin, _Origin) or origin.leaf != id(tensor):
        return tensor
    sharded = origin.sharded()
    return tensor if sharded is None else sharded.parameter
