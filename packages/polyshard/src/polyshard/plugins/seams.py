"""The seams of the engine: what a plugin may replace or watch, as base classes with defaults.

A hook about a group returns a *spec*: a ``name``, ``settings``, and ``bind(group, layout)``, which
makes the part that works for that group. The engine asks for specs when it builds a plan; a step
calls the parts as plain objects. The engine's own parts are written the same way
(:mod:`polyshard.plugins.builtin`).

Rules for all of them:

* Results must be the same on every rank; derive sizes from metadata, never from values.
* ``name`` and ``settings`` go into the plan that all ranks compare before the first collective.
* Tensor arguments belong to the engine and are valid only during the call, unless stated otherwise.
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
    "ShardStorage",
    "ShardingConstraint",
    "Spec",
    "StateDictAdapter",
    "Stateful",
    "StorageFactory",
    "like",
    "local_of",
    "overrides",
    "repointed",
    "spec_of",
]

P = TypeVar("P")
B_co = TypeVar("B_co", covariant=True)


def overrides(method: Callable[..., Any], default: Callable[..., Any]) -> bool:
    """Whether ``method`` of an object overrides the ``default`` of its base; for plan time."""
    return (method.__func__ if inspect.ismethod(method) else method) is not default


@dataclass(frozen=True)
class ParamInfo:
    """Metadata of one parameter; immutable and equal on every rank.

    ``fqn`` is relative to the unit that owns the parameter. ``shape`` is the full shape in
    elements, ``dtype`` the original dtype, ``module_class`` the class of the module that registers
    it. ``placements`` are those of a parameter that was a ``DTensor`` before sharding (on its own
    mesh), else ``None``. ``shard_dim`` is the dim of the tensor from ``pre_flatten_transform`` that
    is sharded over ``mesh``; it is ``None`` before the engine has chosen it, and for parameters
    kept whole. ``reduce_dtype`` is that of the policy, ``None`` if the policy sets none.
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
    """Texts from ``polyshard_parameter_facts``."""
    part_shape: tuple[int, ...] | None = None
    """Shape of the tensor that is sharded over ``mesh``: the parameter, or this rank's part of a
    ``DTensor``; ``None`` where a plugin shards another tensor instead."""


class GroupIdentity:
    """Identifies one parameter group for its whole life: the key for a plugin's state of the group.

    Every :class:`GroupInfo` of one group has the same object, and no other group has it. It is
    hashable and supports weak references. ``str()`` gives the current name in ``describe()``.
    """

    def __init__(self, text: str, *, is_named: bool = False) -> None:
        """``text`` is the name in errors until the root names the group."""
        self.text, self.is_named = text, is_named

    @override
    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class GroupInfo:
    """Metadata of a parameter group.

    ``identity`` is the key for state that a plugin keeps of the group. ``rank`` and ``world_size``
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
        """Name of the group in ``describe()``; unique in a model.

        The root names its groups when it first runs or is first described: after hooks ran and
        storages were bound, and before codecs are. Before that, this raises a ``PluginError``.
        A unit on which ``unshard()`` is called even earlier binds its codecs without a name, and
        again once the root has named it; ``identity.is_named`` says which it is.
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


class HasNotices:
    """An object with ``notices``: lines that ``describe()`` shows for a group, read after binding.

    An attribute of the class or the instance, or a property.
    """

    if TYPE_CHECKING:  # read-only to mypy, so that all three may override it

        @property
        def notices(self) -> tuple[str, ...]:
            """Lines of text."""

    else:
        notices: tuple[str, ...] = ()


class Named(HasNotices):
    """An object that plans list.

    ``name`` is short and public. ``settings``, empty by default, lists as text everything that
    changes results or sizes; ranks compare it. Each is written as ``notices`` are.
    """

    if TYPE_CHECKING:  # as in HasNotices

        @property
        def name(self) -> str:
            """Name in errors and ``describe()``."""

        @property
        def settings(self) -> str:
            """Settings as text."""

    else:
        name: str
        settings: str = ""


class Spec(Named, ABC, Generic[B_co]):
    """The result of a hook about a group: settings, and a factory for the part of each group."""

    @abstractmethod
    def bind(self, group: GroupInfo, layout: GroupLayout) -> B_co | None:
        """Return the part for one group, or ``None`` to use the engine's own part.

        The engine binds codecs again after parameters were frozen, unfrozen, converted or renamed:
        only parameters with ``requires_grad`` can get a gradient.
        """


@dataclass(frozen=True)
class Around(Generic[P]):
    """A result of an exclusive hook that wraps the spec in use instead of replacing it.

    Wrappers nest in plugin order, the first outermost, around the spec of another plugin or of the
    engine. Plans show the nesting, and ranks compare it. ``make`` takes the spec in use for one
    group and returns the spec to use instead. It raises :class:`polyshard.errors.PluginError` if it
    cannot wrap that spec, and returns its argument to decline.
    """

    make: Callable[[P], P]


@runtime_checkable
class Stateful(Protocol):
    """An object with saved state, as ``torch.distributed.checkpoint`` defines it too."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the saved state."""


class Measured:
    """A part with statistics."""

    def numbers(self) -> Mapping[str, float]:
        """Return statistics of the group for ``stats(model)``, by name: an error, say.

        Only ``stats`` calls it, so it may wait for the device.
        """
        return {}


class BoundGatherCodec(Measured, ABC):
    """An all-gather codec bound to one group."""

    payload_bytes: int
    """Bytes that every rank sends to each peer; equal on all ranks."""

    keeps_payload: bool = False
    """Whether the engine keeps this rank's payload between gathers, and calls :meth:`encode` only
    after the shard changed."""

    @abstractmethod
    def encode(self, shard: Tensor, payload: Tensor) -> None:
        """Write ``shard`` (``[shard_numel]``, original dtype) into ``payload`` (uint8)."""

    @abstractmethod
    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        """Fill each parameter's ``[W, chunk_numel]`` region (param dtype) from all payloads.

        ``payloads`` is ``[W, payload_bytes]`` uint8 in rank order. A region may be a strided view.
        Each rank decodes its own chunk too, so that all ranks compute with the same values.
        """


class GatherCodec(Spec[BoundGatherCodec]):
    """Encodes a shard for the all-gather, and decodes it. Exclusive per group."""


class BoundReplicaCodec(ABC):
    """Sums over the replicate axis: the second stage of a reduction."""

    payload_bytes: int
    """Bytes that every replica sends to each other replica; equal on all ranks."""

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
    """Codec of the sums between replicas, if the mesh has any; ``None``: the engine sums them."""

    divisor: float | None = None
    """Divisor of the sums, unless ``set_gradient_divide_factor`` sets one; ``None``: the number of
    ranks. For a codec whose sums do not have one gradient from each rank."""

    sums_in_tree: bool = False
    """Whether :meth:`decode_sum` is bitwise equal to summing unchanged gradients in the reduce
    dtype over a binary tree of the ranks, ``(g0 + g1) + (g2 + g3)``. If the transport can do that,
    the engine uses it instead of :meth:`encode` and :meth:`decode_sum`."""

    kept_bytes: int = 0
    """Most bytes of sums that :meth:`keep` holds back; equal on all ranks."""

    def begin(self, present: frozenset[int]) -> None:
        """Called when a reduction starts, with the indices of parameters that have a gradient.

        Called before :meth:`encode`, for codecs that carry part of a gradient to the next
        reduction: the engine discards sums of other parameters. Ranks may not have compared the
        indices yet. Where they differ the step fails on all ranks and :meth:`decode_sum` and
        :meth:`keep` are not called, so raise what depends on them in :meth:`keep`.
        """

    @abstractmethod
    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        """Write each parameter's ``[W, chunk_numel]`` gradient chunks into ``[W, bytes]`` uint8.

        Chunks are in the reduce dtype, zero where a parameter got no gradient. Do not write to
        them: they may be memory of autograd, or one expanded zero.
        """

    @abstractmethod
    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        """Sum the ``W`` received payloads into each ``[chunk_numel]`` out (reduce dtype).

        ``payloads[r]`` came from rank ``r``. Sum in rank order, so that results are deterministic.
        Do not average: the engine divides.
        """

    def keep(self, total: Tensor) -> Tensor | None:
        """Return what to add to ``.grad`` for ``total`` (``[shard_numel]``, reduce dtype).

        ``total`` is the undivided sum of one backward over the shard axis. ``None`` adds nothing
        now: the codec owns ``total``, and after a later backward returns the sum of all it kept.
        """
        return total


class ReduceCodec(Spec[BoundReduceCodec]):
    """Decides how gradients are sent and summed. Exclusive per group."""


class ShardStorage(ABC):
    """Where one group's shard rests between uses (device, host, disk)."""

    prefetch_units: int = 0
    """How many units ahead of the computing one the engine calls :meth:`prefetch`; 0: never."""

    holds_gradients: bool = False
    """Whether the engine accumulates gradients on the device until the last backward (see
    ``set_is_last_backward``), and :meth:`place_gradient` gets only their sum."""

    fetches_on_stream: bool = False
    """Whether :meth:`fetch` only launches copies on the current stream, into memory taken there:
    then :meth:`release` follows as soon as the gather is launched on that stream, too."""

    places_on_stream: bool = False
    """Whether :meth:`place_gradient` only launches copies on the current stream, which
    :meth:`settle` waits for: then it is called on a transfer's stream, beside the computation."""

    @abstractmethod
    def rest(self, shard: Tensor) -> Tensor:
        """Take ownership of a new shard buffer; return the tensor that the optimizer will see."""

    @abstractmethod
    def view(self) -> Tensor:
        """Return the tensor that :meth:`fetch` fills: ``[shard_numel]`` on the compute device.

        Always return the same tensor: transfers are bound to it once. Its memory may be freed and
        allocated again, its storage object must stay. When the engine calls this, the tensor must
        have memory, not yet values.
        """

    def changed(self) -> None:
        """Called when the shard may have changed since the last fetch; :meth:`fetch` follows.

        Called before the first fetch of a forward or of ``unshard()``, if an optimizer, a loaded
        checkpoint or ``.data`` may have written. The shard does not change within a forward and its
        backward.
        """

    def prefetch(self) -> None:
        """Start to copy the shard to the device for a gather that follows soon.

        :meth:`fetch` follows, or :meth:`release` if the shard changed or the gather is cancelled.
        """

    @abstractmethod
    def fetch(self) -> None:
        """Fill :meth:`view` with the shard; the gather reads it until :meth:`release`.

        A gather that sends a kept payload again does not fetch.
        """

    def release(self) -> None:
        """Called when the gather has read the shard."""

    def place_gradient(self, gradient: Tensor) -> Tensor:
        """Move a reduced gradient (``[shard_numel]``, original dtype) next to the resting shard.

        By default it stays where it was reduced. An override gets zeros in padding and for
        parameters without a gradient. Its result becomes ``.grad``, so it must not share memory
        with anything else while ``.grad`` exists.
        """
        return gradient

    def settle(self) -> None:
        """Make the host wait for copies in flight, before it reads gradients or writes the shard.

        For storages that copy asynchronously: streams do not order the host. Called at the end of a
        backward or of a forward without grad mode, and before the engine adds to gradients from
        :meth:`place_gradient` or passes them to hooks.
        """

    def hold(self, parameters: Sequence[Tensor]) -> None:
        """Receive the sharded parameters, all in the memory that :meth:`rest` returned.

        Called when they are made and again after they were replaced or moved. Each has a storage
        of its own that keeps that memory alive, as do parts of the result of
        :meth:`place_gradient`: ask the owner of memory whether it is unused. With an override, the
        engine moves existing parameters instead of leaving them in the old memory.
        """

    def serve_codec(self, enable: bool) -> None:
        """Called for each binding, before :meth:`view`: ``enable`` is whether a codec reads it.

        For storages on the host: a codec may read a view there, or the tensor from :meth:`rest`,
        and only the payload moves to the compute device.
        """


class StorageFactory(Spec[ShardStorage]):
    """Decides where shards rest. Exclusive per group; bound once, when the group is sharded."""


class CollectivesBackend(Named, ABC):
    """Decides how bytes move. Exclusive per group; bound once, before its layout is planned."""

    @abstractmethod
    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        """Return a transport between the ranks of the shard axis, on ``group.device``."""


class ShardingConstraint(Named, ABC):
    """Declares which elements of a parameter must not be separated."""

    @abstractmethod
    def block_elements(self, param: ParamInfo) -> int:
        """Return how many contiguous elements must stay on one rank; 1 for no constraint."""


class StateDictAdapter(Named, ABC):
    """Converts parameters that a plugin changed to and from their native form in checkpoints."""

    @abstractmethod
    def on_save(self, param: ParamInfo, value: Any) -> Any:
        """Return the value to store under the parameter's original name."""

    @abstractmethod
    def on_load(self, param: ParamInfo, value: Any) -> Any:
        """Return the value to load into the parameter."""

    def on_save_state(self, param: ParamInfo, name: str, value: Any) -> Any:
        """Return the value to store for optimizer state ``name`` of the parameter's shape.

        The default suits an adapter that only moves elements. One that changes values overrides
        this and :meth:`on_load_state`; else the engine saves the state unconverted, with a warning.
        Ranks compare whether it does at the first state dict of an optimizer, which all of them
        take or load.
        """
        return self.on_save(param, value)

    def on_load_state(self, param: ParamInfo, name: str, value: Any) -> Any:
        """Return the value to load into optimizer state ``name``."""
        return self.on_load(param, value)


class Observer(HasNotices):
    """Observes groups and units: override the methods of interest, and change nothing.

    ``group`` and ``unit`` are names in ``describe()``; a group has the name of its unit, and a
    number where a unit has several. Names repeat between models: to tell models apart, a plugin
    gives each group an observer of its own, made for :attr:`GroupInfo.identity`. Seconds are host
    time: on an accelerator they end when the work was launched. After every begin follows its end,
    or :meth:`on_broken`.
    """

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

    def on_start(self, group: str, what: str) -> None:
        """A gather (``what`` is ``"gather"``) or a reduction (``"reduce"``) is about to start.

        :meth:`on_unshard` or :meth:`on_reduce` follows after the start; by then peers may have
        received everything. Neither follows if the start failed or there was nothing to reduce.
        """

    def on_forward(self, unit: str) -> None:
        """A module of ``unit`` runs, gathered; units inside of it run before its end.

        Activation checkpointing runs it again, in backward.
        """

    def on_forward_end(self, unit: str) -> None:
        """The module has returned or raised."""

    def on_backward(self, unit: str) -> None:
        """The backward of ``unit`` runs, gathered; that of other units may begin before its end."""

    def on_backward_end(self, unit: str) -> None:
        """The gradients of ``unit`` are ready, or the whole backward has ended."""

    def on_replicas_summed(self, group: str, payload_bytes: int, seconds: float) -> None:
        """``payload_bytes`` of gradients were summed over replicas, in ``seconds`` of host time.

        Not called for gradients that are reduced whole to an owner.
        """

    def on_staged(self, group: str, direction: str, num_bytes: int, seconds: float) -> None:
        """A storage moved a shard or a gradient, or began to, in ``seconds`` of host time.

        ``direction`` is ``"fetch"`` (the shard, before a gather) or ``"place"`` (a reduced
        gradient). Asynchronous copies end later.
        """

    def on_broken(self) -> None:
        """An exception ended the step: no end follows what has begun."""


class OwnedParameter(Protocol):
    """A parameter whose gradient is reduced whole to one rank, its owner; the engine makes it.

    All ranks of the group's mesh must call the methods that communicate, in the same order.
    """

    @property
    def info(self) -> ParamInfo:
        """Current name and shape."""

    @property
    def parameter(self) -> nn.Parameter:
        """The current sharded parameter."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole gradient: ``info.part_shape``."""

    @property
    def owner(self) -> int:
        """Position of the owner in the group's mesh, counted row by row."""

    @property
    def is_owner(self) -> bool:
        """Whether this rank is the owner."""

    def has_landed(self) -> bool:
        """Whether ``.grad`` is the whole gradient; else it is rows that other code assigned.

        Without any gradient, this raises a ``LifecycleError``.
        """

    def gradient(self) -> Tensor | None:
        """Return the whole gradient on the owner (the memory of ``.grad``), ``None`` elsewhere."""

    @property
    def writes(self) -> int:
        """Number of writes to the gradient since it was reduced."""

    def scatter(
        self, whole: Tensor | None, dtype: torch.dtype, *, key: int = 0
    ) -> Callable[[], Tensor]:
        """Start to send each rank its rows of ``whole``, which only the owner has.

        Call the result exactly once on every rank: it waits, and returns this rank's rows in the
        shape of its shard. ``key`` distinguishes concurrent transfers of one parameter.
        """

    def gather(self, rows: Tensor) -> Tensor | None:
        """Gather the ``rows`` of all ranks: the whole tensor on the owner, ``None`` elsewhere."""


class GradientLanding(Named, ABC):
    """Decides which gradients are reduced whole to an owner, and its rank. Exclusive per group.

    ``.grad`` of such a parameter is a ``DTensor`` whose rows are all on the owner. Norms and
    scaling accept it; operations that need rows on their own ranks refuse it.
    """

    @abstractmethod
    def owners(self, group: GroupInfo) -> Sequence[int | None]:
        """Return the owner of each parameter, or ``None`` to scatter its gradient to shards.

        An owner is a position in ``group.mesh``, counted row by row. Called once for each group.
        """

    lands: bool = True
    """Whether gradients are reduced to their owners. If not, they are scattered to shards, so that
    other plugins can decide how they are summed. The engine then calls :meth:`hold` but never
    :meth:`landed`; the plugin gathers the rows of a gradient that it needs whole."""

    takes_parts: bool = False
    """Whether the plugin joins parts of a matrix that other axes of a ``DTensor`` 's mesh divide.
    The owner's gradient is then whole only over ``group.mesh``: a part, of ``info.part_shape``."""

    def show(self, group: GroupInfo, parameters: Sequence[nn.Parameter]) -> None:
        """Receive all sharded parameters of the group, in order, before each :meth:`hold`."""

    def hold(self, group: GroupInfo, parameters: Sequence[OwnedParameter]) -> None:
        """Receive the parameters that have an owner.

        Called again when the engine makes the transfers of a parameter anew: use the last object.
        """

    def landed(self, parameter: OwnedParameter) -> None:
        """Called when the gradient of ``parameter`` is complete, on all ranks of the mesh.

        Called in the last backward of an iteration only. Must not communicate.
        """
