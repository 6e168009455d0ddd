"""The seams of the engine: what a plugin may replace or watch, as base classes with defaults.

A hook about a group returns a *spec*: a ``name``, ``settings``, and ``bind(group, layout)``, which
gives the part that works for that group. Specs are asked for at plan time and frozen into the plan;
a step uses the parts as plain objects. The engine's own parts are written the same way
(:mod:`polyshard.plugins.builtin`).

Rules that hold for all of them:

* Answers must be the same on every rank; sizes are derived from metadata, never from values.
* ``name`` and ``settings`` go into the plan that all ranks compare before the first collective.
* Tensors handed in are owned by the engine and valid only during the call, unless said otherwise.
"""

# ruff: noqa: B027  (an empty method is a default)

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from typing_extensions import override

from polyshard._torch.optimizers import like, local_of, repointed, spec_of
from polyshard.errors import PluginError
from polyshard.sharding.layout import GroupLayout, ParameterLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

    from polyshard.sharding.mesh import MeshRoles
    from polyshard.transport.base import Transport

__all__ = [
    "Around",
    "BoundGatherCodec",
    "BoundReduceCodec",
    "BoundReplicaCodec",
    "CollectivesBackend",
    "GatherCodec",
    "GradientLanding",
    "GroupIdentity",
    "GroupInfo",
    "GroupLayout",
    "Named",
    "Observer",
    "OwnedParameter",
    "ParamInfo",
    "ParameterLayout",
    "ReduceCodec",
    "Rows",
    "ShardStorage",
    "ShardingConstraint",
    "Spec",
    "StateDictAdapter",
    "Stateful",
    "StepObserver",
    "StorageFactory",
    "Undoable",
    "like",
    "local_of",
    "overrides",
    "repointed",
    "spec_of",
]

P = TypeVar("P")
B_co = TypeVar("B_co", covariant=True)


def overrides(method: Callable[..., Any], default: Callable[..., Any]) -> bool:
    """Whether ``method``, looked up on an object, is its own and not the ``default`` of its base.

    For plan time: what a step needs of it is kept as a plain attribute.
    """
    return (method.__func__ if inspect.ismethod(method) else method) is not default


# What plugins may know ----------------------------------------------------------------------------


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
    """One parameter group for as long as it lives: the key for what a plugin keeps of a group.

    The same object in every :class:`GroupInfo` of one group, and of no other; hashable, and may be
    referred to weakly. ``str()`` gives what ``describe()`` calls the group now.
    """

    def __init__(self, text: str, *, is_named: bool = False) -> None:
        """``text`` is what errors call the group until its root names it."""
        self.text, self.is_named = text, is_named

    @override
    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class GroupInfo:
    """What a plugin may know of a parameter group.

    ``identity`` is the group itself: the key for what is kept of it. ``rank`` and ``world_size``
    are those of the shard axis. ``param_dtype`` is the dtype of the unsharded parameters,
    ``reduce_dtype`` that of the gradient reduction.
    """

    identity: GroupIdentity = field(compare=False, repr=False)
    parameters: tuple[ParamInfo, ...]
    mesh: DeviceMesh
    rank: int
    world_size: int
    device: torch.device
    orig_dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype

    @property
    def name(self) -> str:
        """What ``describe()`` calls the group; unique in a model.

        The root names its groups when it runs or is described for the first time. Codecs are bound
        after that; hooks run and storages are bound before.

        Raises:
            PluginError: before that.
        """
        if not self.identity.is_named:
            shown = ", ".join(p.fqn for p in self.parameters[:4])
            raise PluginError(
                f"the group of {shown} in a '{self.identity}' has no name yet: its root names it "
                "when it first runs. Choose groups by what is known now (group.parameters: fqn, "
                "shape, module_class), keep state by group.identity, and write str(group.identity) "
                "where a message calls the group."
            )
        return self.identity.text


# What a spec is -----------------------------------------------------------------------------------


class Named:
    """Anything that shows up in a plan.

    ``name`` is short and public; ``settings``, empty by default, says as text all that changes
    results or sizes, and ranks compare it; ``notices`` is what ``describe()`` says of the group,
    read after it was bound. Each is a class attribute, an attribute that an instance sets, or a
    property.
    """

    if TYPE_CHECKING:  # read-only to mypy, so that all three may override it

        @property
        def name(self) -> str:
            """As in errors and ``describe()``."""

        @property
        def settings(self) -> str:
            """As text."""

        @property
        def notices(self) -> tuple[str, ...]:
            """Lines of text."""

    else:
        name: str
        settings: str = ""
        notices: tuple[str, ...] = ()


class Spec(Named, ABC, Generic[B_co]):
    """What a hook about a group returns: settings, and what makes the part of each group."""

    @abstractmethod
    def bind(self, group: GroupInfo, layout: GroupLayout) -> B_co | None:
        """The part for one group; ``None`` leaves the group to the engine's own.

        Codecs are bound again after parameters were frozen, unfrozen, converted or renamed:
        ``requires_grad`` of a parameter says whether a gradient of it may come.
        """


@dataclass(frozen=True)
class Around(Generic[P]):
    """An answer to an exclusive hook that is no claim, but goes around whoever has the role.

    Wrappers nest in plugin order, the first outermost, around what another plugin claims or else
    around the engine's own part. Plans show the nesting, and ranks compare it.

    Attributes:
        make: gives the spec that is used in place of the one it is given, for one group. It raises
            :class:`polyshard.errors.PluginError` where it cannot go around that, and returns the
            same spec to stay out.
    """

    make: Callable[[P], P]


@runtime_checkable
class Stateful(Protocol):
    """What a checkpoint can hold, as ``torch.distributed.checkpoint`` calls it as well."""

    def state_dict(self) -> dict[str, Any]:
        """What to save: plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was saved."""
        ...


@runtime_checkable
class Undoable(Protocol):
    """An optimizer that keeps more than ``optimizer.state`` shows.

    An attempt (of polyshard-resilience) that failed writes parameters, state and settings of its
    optimizers back to what they were. What a plugin keeps of a model is put back through
    ``polyshard_plugin_state``.
    """

    @property
    def polyshard_steps_early(self) -> bool:
        """Whether parameters change before ``step()`` is called: in backward."""
        ...

    def polyshard_undo(self) -> None:
        """Let go of a step that failed.

        After this, values are written back into parameters, and ``optimizer.state`` gets new
        tensors, with the values that those in it had.
        """
        ...


# Codecs -------------------------------------------------------------------------------------------


class Measured:
    """A part that may show numbers."""

    def numbers(self) -> Mapping[str, float]:
        """What ``stats(model)`` shows of the group, by name: an error, a share of saturated values.

        Called when somebody asks for it, and may wait for the device then.
        """
        return {}


class BoundGatherCodec(Measured, ABC):
    """An all-gather codec bound to one group."""

    payload_bytes: int
    """Bytes every rank sends to each peer; equal on all ranks."""

    keeps_payload: bool = False
    """Have the engine keep this rank's payload between gathers, and call :meth:`encode` only after
    the shard changed."""

    @abstractmethod
    def encode(self, shard: Tensor, payload: Tensor) -> None:
        """Write ``shard`` (``[shard_numel]``, original dtype) into ``payload`` (uint8)."""

    @abstractmethod
    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        """Fill each parameter's ``[W, chunk_numel]`` region (param dtype) from all payloads.

        ``payloads`` is ``[W, payload_bytes]`` uint8 in rank order. A region may be a strided view.
        The owner's own chunk is decoded too: every rank must compute with the same values.
        """


class GatherCodec(Spec[BoundGatherCodec]):
    """Turns a shard into what travels in the all-gather, and back. Exclusive per group."""


class BoundReplicaCodec(ABC):
    """Sums over the replicate axis, as the second hop of a reduction."""

    payload_bytes: int
    """Bytes every replica sends to each other one; equal on all ranks."""

    @abstractmethod
    def encode(self, total: Tensor, payload: Tensor) -> None:
        """Write the sum over the shard axis (``[shard_numel]``, reduce dtype) into ``payload``."""

    @abstractmethod
    def decode_sum(self, payloads: Tensor, total: Tensor) -> None:
        """Overwrite ``total`` with the sum of all replicas' ``payloads`` (``[R, bytes]``)."""


class BoundReduceCodec(Measured, ABC):
    """A reduce-scatter codec bound to one group."""

    payload_bytes: int
    """Bytes sent to each peer; equal on all ranks."""

    replicas: BoundReplicaCodec | None = None
    """Owns how sums travel between replicas, on a mesh that has some; ``None`` leaves it to the
    engine."""

    divisor: float | None = None
    """What the engine divides sums by, unless ``set_gradient_divide_factor`` says; ``None``: the
    number of ranks. For a codec whose sums are not of one gradient from each rank."""

    sums_in_tree: bool = False
    """Whether :meth:`decode_sum` gives, to the last bit, sums of unchanged gradients in the reduce
    dtype over a binary tree of the ranks, ``(g0 + g1) + (g2 + g3)``. Where the transport can make
    the same sums it does, and :meth:`encode` and :meth:`decode_sum` are not called."""

    kept_bytes: int = 0
    """Memory that sums which :meth:`keep` keeps take at most; equal on all ranks."""

    def begin(self, present: frozenset[int]) -> None:
        """A reduction starts: these parameters have a gradient, by index, the same on all ranks.

        Called before :meth:`encode`. For a codec that keeps something of a gradient for the next
        reduction: what is sent for other parameters reaches no ``.grad``.
        """

    @abstractmethod
    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        """Write each parameter's ``[W, chunk_numel]`` gradient chunks into ``[W, bytes]`` uint8.

        Chunks are in the reduce dtype, zero where a parameter got no gradient. They may be the
        memory autograd wrote, or one zero expanded: read them only.
        """

    @abstractmethod
    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        """Sum the ``W`` received payloads into each ``[chunk_numel]`` out (reduce dtype).

        ``payloads[r]`` came from rank ``r``. Sum in rank order, so that results are deterministic.
        Averaging is the engine's: return plain sums.
        """

    def keep(self, total: Tensor) -> Tensor | None:
        """The sum of one backward over the shard axis (``[shard_numel]``, reduce dtype), undivided.

        Return it, or another in its place; ``None`` keeps it from ``.grad`` for now: whoever keeps
        ``total`` may change it, and gives the sum of all that was kept after a later backward.
        """
        return total


class ReduceCodec(Spec[BoundReduceCodec]):
    """Owns how gradients travel and are summed. Exclusive per group."""


# Storage ------------------------------------------------------------------------------------------


class ShardStorage(ABC):
    """Where one group's shard rests between uses (device, host, disk)."""

    prefetch_units: int = 0
    """Units whose shards may be brought near ahead of the one that computes; with 0,
    :meth:`prefetch` is not called."""

    holds_gradients: bool = False
    """Have gradients of backwards that ``set_is_last_backward(False)`` says are not the last add up
    on the device, and :meth:`place_gradient` get their sum."""

    places_on_stream: bool = False
    """Whether :meth:`place_gradient` only launches copies on the current stream, which
    :meth:`settle` waits for: then it is called on a transfer's stream, beside the computation."""

    @abstractmethod
    def rest(self, shard: Tensor) -> Tensor:
        """Take over a freshly built shard buffer; return the tensor the optimizer will see."""

    @abstractmethod
    def view(self) -> Tensor:
        """``[shard_numel]`` on the compute device: what :meth:`fetch` fills. Always one tensor.

        Transfers are bound to it once, so its memory may come and go but not its storage. Views of
        it are made whenever it is asked for: it must have memory then, if not yet its values.
        """

    def changed(self) -> None:
        """The shard may have been written since it was last fetched; :meth:`fetch` follows.

        Called before the first fetch of a turn (a forward, or ``unshard()``) where anything may
        have written: an optimizer, a loaded checkpoint, ``.data``. Within a forward and its
        backward the shard holds still.
        """

    def prefetch(self) -> None:
        """A gather of this group comes soon: start bringing the shard to the device.

        :meth:`fetch` follows, or :meth:`release` if the shard changed or is not wanted after all.
        """

    @abstractmethod
    def fetch(self) -> None:
        """Fill :meth:`view` with the shard; it is read until :meth:`release`.

        A gather that sends a kept payload again does not fetch.
        """

    def release(self) -> None:
        """The gather has read the shard."""

    def place_gradient(self, gradient: Tensor) -> Tensor:
        """Move a reduced gradient (``[shard_numel]``, original dtype) next to the resting shard.

        Without an override it stays where it was reduced. An override sees zeros where no gradient
        comes: in padding, and for parameters without one. What it returns becomes ``.grad``, so it
        needs memory of its own as long as that lives.
        """
        return gradient

    def settle(self) -> None:
        """Have the host wait for copies under way: it may read gradients and write the shard next.

        For storages that copy beside the computation: no stream orders what the host does. Called
        when a turn has ended (a backward, a forward without grad mode), and before gradients that
        :meth:`place_gradient` returned are added to or shown to hooks.
        """

    def hold(self, parameters: Sequence[Tensor]) -> None:
        """See the sharded parameters, all of which rest in the memory :meth:`rest` returned.

        Called when they are made and again after they were replaced or moved. Each is the start of
        a storage of its own that keeps that memory alive, as do parts of what
        :meth:`place_gradient` returns: who counts on memory being unused asks its owner. With an
        override, parameters that somebody holds are moved along instead of left where they were.
        """

    def serve_codec(self, enable: bool) -> None:
        """Hear whether a codec reads the shard; called before :meth:`view`, for each binding.

        For storages on the host: for a codec the view may lie there, or be what :meth:`rest`
        returned, and the payload is what moves to the compute device.
        """


class StorageFactory(Spec[ShardStorage]):
    """Decides where shards rest. Exclusive per group; bound once, when the group is sharded."""


# Backends, constraints, adapters ------------------------------------------------------------------


class CollectivesBackend(Named, ABC):
    """Decides how bytes move. Exclusive per group; bound once, before its layout is planned."""

    @abstractmethod
    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        """A transport between the ranks of the shard axis, on ``group.device``."""


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


# Observers ----------------------------------------------------------------------------------------


class Observer:
    """Watches the life cycle of groups: override what should be seen.

    Must not change anything; costs nothing when absent. Groups are called by name, as
    ``describe()`` calls them. Names repeat between models: a plugin that tells models apart gives
    each group an observer of its own, made for :attr:`GroupInfo.identity`.
    """

    if TYPE_CHECKING:  # as in Named

        @property
        def notices(self) -> tuple[str, ...]:
            """What ``describe()`` says of the groups it watches."""
            raise NotImplementedError

    else:
        notices: tuple[str, ...] = ()

    def on_unshard(self, group: str, payload_bytes: int) -> None:
        """An all-gather of ``group`` starts; ``payload_bytes`` leave this rank."""

    def on_unsharded(self, group: str, wait_seconds: float) -> None:
        """The unsharded parameters are ready, after the host waited this long."""

    def on_reshard(self, group: str) -> None:
        """The unsharded parameters were freed."""

    def on_reduce(self, group: str, payload_bytes: int) -> None:
        """A gradient reduction starts; ``payload_bytes`` leave this rank."""

    def on_reduced(self, group: str, wait_seconds: float) -> None:
        """The sharded gradients are in place, after the host waited this long."""

    def on_step_end(self) -> None:
        """The backward of the root has ended: all gradients of this step are in place."""


class StepObserver(Observer):
    """Hears more of a step: when units compute, and what moves beside gathers and reductions.

    Units are called by name; a group has the name of its unit, and a number where a unit has
    several. Seconds are the host's: on an accelerator they end when work was launched. Every begin
    is followed by its end, or by :meth:`on_broken`.
    """

    def on_start(self, group: str, what: str) -> None:
        """A gather (``what`` is ``"gather"``) or a reduction (``"reduce"``) is about to start.

        :meth:`on_unshard` or :meth:`on_reduce` follows when it has, by which time peers may have
        got all they need; not so where starting failed, or there was nothing to reduce.
        """

    def on_forward(self, unit: str) -> None:
        """A module of ``unit`` runs, gathered; units inside of it run before its end.

        Activation checkpointing runs it again, in backward.
        """

    def on_forward_end(self, unit: str) -> None:
        """The module has returned or raised."""

    def on_backward(self, unit: str) -> None:
        """The backward of ``unit`` computes, gathered; others may begin before its end."""

    def on_backward_end(self, unit: str) -> None:
        """Its gradients are there, or the backward as a whole has ended."""

    def on_replicas_summed(self, group: str, payload_bytes: int, seconds: float) -> None:
        """``payload_bytes`` of gradients were summed over replicas, which took the host so long.

        Not told of gradients that land whole on an owner.
        """

    def on_staged(self, group: str, direction: str, num_bytes: int, seconds: float) -> None:
        """The storage of a shard that rests elsewhere was asked to move it, and so long it took.

        ``direction`` is ``"fetch"`` (the shard comes, before a gather) or ``"place"`` (a reduced
        gradient goes). What a storage does beside the host ends later.
        """

    def on_broken(self) -> None:
        """An exception broke the step off: what began will not end."""


# Landing ------------------------------------------------------------------------------------------


class Rows(Protocol):
    """Rows of an owner on their way to this rank."""

    def wait(self) -> Tensor:
        """This rank's rows, in the shape of its shard. Call exactly once; all ranks alike."""
        ...


class OwnedParameter(Protocol):
    """A parameter whose gradient lands whole on one rank; the engine makes it.

    Calls that move something are made on all ranks of the group's mesh, in the same order.
    """

    @property
    def info(self) -> ParamInfo:
        """Name and shape, as they are now."""
        ...

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded parameter, as it is now."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the gradient that lands: ``info.part_shape``."""
        ...

    @property
    def owner(self) -> int:
        """Position of the owner in the group's mesh, counted row by row."""
        ...

    @property
    def is_owner(self) -> bool:
        """Whether this rank is the owner."""
        ...

    def has_landed(self) -> bool:
        """Whether ``.grad`` is what landed; else it is rows, which somebody has put there.

        Raises:
            LifecycleError: without any gradient.
        """
        ...

    def gradient(self) -> Tensor | None:
        """What landed, whole, on the owner: the memory of ``.grad``. ``None`` on other ranks."""
        ...

    @property
    def writes(self) -> int:
        """Counts what has written to the gradient since it landed."""
        ...

    def scatter(self, whole: Tensor | None, dtype: torch.dtype, *, key: int = 0) -> Rows:
        """Begin to send rows of ``whole``, which the owner alone has, to all ranks.

        ``key`` tells what is under way at once for one parameter apart.
        """
        ...

    def gather(self, rows: Tensor) -> Tensor | None:
        """The whole of what every rank has some ``rows`` of: on the owner, ``None`` elsewhere."""
        ...


class GradientLanding(Named, ABC):
    """Decides which gradients land whole on an owner, and on which. Exclusive per group.

    ``.grad`` of such a parameter is a ``DTensor`` all of whose rows lie with the owner. Norms and
    scaling take it as any other; what needs rows in their places refuses it.
    """

    @abstractmethod
    def owners(self, group: GroupInfo) -> Sequence[int | None]:
        """For each parameter its owner, or ``None`` where its gradient lands on shards.

        An owner is a position in ``group.mesh``, counted row by row. Asked once for each group.
        """

    lands: bool = True
    """Whether gradients land with their owners.

    Where not, they land on shards as all others do, so that other plugins may own how they are
    summed: :meth:`hold` is called all the same, :meth:`landed` never, and who needs a whole
    gradient gathers its rows.
    """

    takes_parts: bool = False
    """Whether it puts parts of a matrix together that other axes of a ``DTensor`` 's mesh divide.

    What lands on an owner is whole on ``group.mesh`` alone then: a part, of ``info.part_shape``.
    """

    def show(self, group: GroupInfo, parameters: Sequence[nn.Parameter]) -> None:
        """See all sharded parameters of the group, in order; each time before :meth:`hold`."""

    def hold(self, group: GroupInfo, parameters: Sequence[OwnedParameter]) -> None:
        """See the parameters that have an owner.

        Called when what moves them is made, and made anew: the last ones given for a parameter are
        those to use.
        """

    def landed(self, parameter: OwnedParameter) -> None:
        """The gradient of ``parameter`` is in place, on all ranks of the mesh.

        Called within the backward, after the last one of an iteration alone. Must not communicate.
        """
