"""The seams of the engine: what a plugin may replace or watch, as small protocols.

The engine's own behaviour goes through the same protocols (see ``plugins.builtin``), so a
plugin adds a class and edits no engine file. Everything here is asked for at plan time, frozen into
the plan of a group, and used as plain objects during a step.

Rules that hold for all of them:

* Answers must be the same on every rank; sizes are derived from metadata, never from values.
* ``name`` and ``settings`` go into the plan that all ranks compare before the first collective.
* Tensors handed in are owned by the engine and valid only during the call, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

    from polyshard.sharding.layout import GroupLayout
    from polyshard.sharding.mesh import MeshRoles
    from polyshard.transport.base import Transport


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


class Named(Protocol):
    """Anything that shows up in a plan."""

    @property
    def name(self) -> str:
        """Short public name, as in error messages and ``describe()``."""
        ...

    @property
    def settings(self) -> str:
        """All settings that change results or sizes, as text; compared across ranks."""
        ...


class BoundGatherCodec(Protocol):
    """An all-gather codec bound to one group.

    With an attribute ``keeps_payload = True`` the engine keeps this rank's payload between gathers
    and calls :meth:`encode` only after the shard changed.
    """

    payload_bytes: int
    """Bytes every rank sends to each peer; equal on all ranks."""

    def encode(self, shard: Tensor, payload: Tensor) -> None:
        """Write ``shard`` (``[shard_numel]``, original dtype) into ``payload`` (uint8)."""
        ...

    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        """Fill each parameter's ``[W, chunk_numel]`` region (param dtype) from all payloads.

        ``payloads`` is ``[W, payload_bytes]`` uint8 in rank order. A region may be a strided view.
        The owner's own chunk is decoded too: every rank must compute with the same values.
        """
        ...


class GatherCodec(Named, Protocol):
    """Turns a shard into what travels in the all-gather, and back. Exclusive per group.

    May have ``notices``, a tuple of texts that ``describe()`` shows, valid after :meth:`bind`.
    """

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundGatherCodec | None:
        """Prepare for one group; ``None`` leaves it to the engine's native transfer."""
        ...


class BoundReplicaCodec(Protocol):
    """Sums over the replicate axis, as the second hop of a reduction."""

    payload_bytes: int
    """Bytes every replica sends to each other one; equal on all ranks."""

    def encode(self, total: Tensor, payload: Tensor) -> None:
        """Write the sum over the shard axis (``[shard_numel]``, reduce dtype) into ``payload``."""
        ...

    def decode_sum(self, payloads: Tensor, total: Tensor) -> None:
        """Overwrite ``total`` with the sum of all replicas' ``payloads`` (``[R, bytes]``)."""
        ...


class BoundReduceCodec(Protocol):
    """A reduce-scatter codec bound to one group.

    With an attribute ``replicas``, a :class:`BoundReplicaCodec` or ``None``, it also owns how the
    sums travel between replicas on a mesh that has some. One that keeps something of a gradient
    for the next reduction defines ``begin(present: frozenset[int])``, called before :meth:`encode`
    with the indices of the parameters that have a gradient, the same on all ranks: what is sent for
    others reaches no ``.grad``.
    """

    payload_bytes: int
    """Bytes sent to each peer; equal on all ranks."""

    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        """Write each parameter's ``[W, chunk_numel]`` gradient chunks into ``[W, bytes]`` uint8.

        Chunks are in the reduce dtype, zero where a parameter got no gradient. They may be the
        memory autograd wrote, or one zero expanded: read them only.
        """
        ...

    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        """Sum the ``W`` received payloads into each ``[chunk_numel]`` out (reduce dtype).

        ``payloads[r]`` came from rank ``r``. Sum in rank order, so that results are deterministic.
        Averaging is the engine's: return plain sums.
        """
        ...


class ReduceCodec(Named, Protocol):
    """Owns how gradients travel and are summed. Exclusive per group.

    May have ``notices``, a tuple of texts that ``describe()`` shows, valid after :meth:`bind`.
    """

    def bind(self, group: GroupInfo, layout: GroupLayout) -> BoundReduceCodec | None:
        """Prepare for one group; ``None`` leaves it to the engine's native reduction.

        Called again when parameters were frozen or unfrozen: ``requires_grad`` of a parameter says
        whether a gradient of it may come.
        """
        ...


class ShardStorage(Protocol):
    """Where one group's shard rests between uses (device, host, disk).

    A storage that wants to hear of gathers early sets ``prefetch_units``, the number of units that
    may be brought near ahead of the one that computes; without it :meth:`prefetch` is not called.
    One with a method ``hold(parameters)`` is shown the sharded parameters, all of which rest in the
    memory that :meth:`rest` returned, when they are made and again after they were replaced or
    moved. Each is the start of a storage of its own that keeps that memory alive, as do parts of
    what :meth:`place_gradient` returns: who counts on memory being unused asks its owner. With
    ``holds_gradients = True`` gradients of backwards that ``set_is_last_backward(False)`` says are
    not the last add up on the device, and :meth:`place_gradient` gets their sum.

    A storage on the host may define ``serve_codec(enable: bool)``, called before :meth:`view`
    whenever transfers are bound: whether a codec reads the shard. Then the view may lie on the
    host, or be what :meth:`rest` returned, and the payload is what moves to the compute device.
    A gather that sends a kept payload again does not :meth:`fetch`.
    """

    def rest(self, shard: Tensor) -> Tensor:
        """Take over a freshly built shard buffer; return the tensor the optimizer will see."""
        ...

    def view(self) -> Tensor:
        """``[shard_numel]`` on the compute device: what :meth:`fetch` fills. Always one tensor.

        Transfers are bound to it once, so its memory may come and go but not its storage.
        """
        ...

    def prefetch(self) -> None:
        """A gather of this group comes soon: start bringing the shard to the device.

        :meth:`fetch` follows, or :meth:`release` if the shard changed or is not wanted after all.
        """
        ...

    def fetch(self) -> None:
        """Fill :meth:`view` with the shard; it is read until :meth:`release`."""
        ...

    def release(self) -> None:
        """The gather has read the shard."""
        ...

    def place_gradient(self, gradient: Tensor) -> Tensor:
        """Move a reduced gradient (``[shard_numel]``, original dtype) next to the resting shard."""
        ...


class StorageFactory(Named, Protocol):
    """Decides where shards rest. Exclusive per group.

    May have ``notices``, a tuple of texts that ``describe()`` shows, valid after :meth:`create`.
    """

    def create(self, group: GroupInfo, layout: GroupLayout) -> ShardStorage:
        """A storage for one group."""
        ...


class CollectivesBackend(Named, Protocol):
    """Decides how bytes move. Exclusive per group."""

    def connect(self, roles: MeshRoles, device: torch.device) -> Transport:
        """A transport between the ranks of the shard axis."""
        ...


class ShardingConstraint(Named, Protocol):
    """Says which elements of a parameter must not be separated."""

    def block_elements(self, param: ParamInfo) -> int:
        """Contiguous elements that must stay on one rank; 1 when anything goes."""
        ...


class ModelPreparation(Named, Protocol):
    """Changes a module before its parameters are sharded (apply a tensor-parallel plan, say)."""

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Called once per ``fully_shard`` call, in plugin order, before parameters are collected.

        The same plugin object is usually passed to many calls: preparing twice must be harmless.
        """
        ...


class Observer(Protocol):
    """Watches the life cycle of groups. Must not change anything; costs nothing when absent.

    Groups are called by name. Names repeat between models: a plugin that tells models apart gives
    each group an observer of its own, made for :attr:`GroupInfo.identity`.
    May have ``notices``, a tuple of texts that ``describe()`` shows.
    """

    def on_unshard(self, group: str, payload_bytes: int) -> None:
        """An all-gather of ``group`` starts; ``payload_bytes`` leave this rank."""
        ...

    def on_unsharded(self, group: str, wait_seconds: float) -> None:
        """The unsharded parameters are ready, after the host waited this long."""
        ...

    def on_reshard(self, group: str) -> None:
        """The unsharded parameters were freed."""
        ...

    def on_reduce(self, group: str, payload_bytes: int) -> None:
        """A gradient reduction starts; ``payload_bytes`` leave this rank."""
        ...

    def on_reduced(self, group: str, wait_seconds: float) -> None:
        """The sharded gradients are in place, after the host waited this long."""
        ...

    def on_step_end(self) -> None:
        """The backward of the root has ended: all gradients of this step are in place."""
        ...


class StateDictAdapter(Named, Protocol):
    """Keeps checkpoints native when a plugin changes what a parameter looks like."""

    def on_save(self, param: ParamInfo, value: Any) -> Any:
        """The value to store under the parameter's original name."""
        ...

    def on_load(self, param: ParamInfo, value: Any) -> Any:
        """The value to load into the parameter."""
        ...


class ParameterTransform(Named, Protocol):
    """One layer of the onion around a parameter (see ``pre_flatten_transform`` in the hookspecs).

    Flattening runs in plugin order, unflattening in reverse. Both run outside autograd: the
    outermost unflattened tensor becomes the autograd leaf, and its gradient is flattened again
    before it is reduced.
    """

    def flatten(self, tensor: Tensor, param: ParamInfo | None) -> tuple[Tensor, Any | None]:
        """The tensor to shard in place of ``tensor``, and what :meth:`unflatten` will need.

        ``None`` as the second answer says "not mine": the tensor must come back unchanged.
        """
        ...

    def unflatten(self, tensor: Tensor, param_extension: Any, param: ParamInfo | None) -> Tensor:
        """Undo :meth:`flatten` on the unsharded tensor. The result must alias ``tensor``."""
        ...


@dataclass(frozen=True)
class Contributions:
    """Everything plugins add to one group, checked, ordered and frozen.

    The exclusive seams hold the engine's own object where no plugin claims them; the others are
    tuples in plugin order, empty when unused.
    """

    gather_codec: GatherCodec
    reduce_codec: ReduceCodec
    storage: StorageFactory
    backend: CollectivesBackend
    constraints: tuple[ShardingConstraint, ...] = ()
    observers: tuple[Observer, ...] = ()
    adapters: tuple[StateDictAdapter, ...] = ()
    plugin_lines: tuple[str, ...] = ()
    """One line per plugin of the stack, in order: name, version, settings."""
    labels: tuple[tuple[object, str], ...] = ()
    """The plugin that each part came from: name and version, as errors call it."""

    def plugin_of(self, part: object) -> str:
        """How an error calls the plugin that contributed ``part``."""
        found = (label for owned, label in self.labels if owned is part)
        return f"plugin {next(found, repr(getattr(part, 'name', type(part).__name__)))}"
