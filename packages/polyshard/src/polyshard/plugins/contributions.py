"""Who does what for a group: roles, claims, what goes around them, and checks of what they give.

A new exclusive hook is a specification in :mod:`~polyshard.plugins.hookspecs` and a row here.
Claims, plans, ``describe()``, errors and the reference are made from the rows; code that uses a
spec reads it as ``contributions[ROW]``, which mypy knows the class of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from polyshard.errors import ConflictError, PluginError, warn
from polyshard.plugins.builtin import (
    DefaultBackend,
    DeviceStorageFactory,
    NativeGatherCodec,
    NativeReduceCodec,
    ShardLanding,
)
from polyshard.plugins.seams import (
    Around,
    BoundGatherCodec,
    BoundReduceCodec,
    BoundReplicaCodec,
    CollectivesBackend,
    GatherCodec,
    GradientLanding,
    GroupIdentity,
    GroupInfo,
    Named,
    Observer,
    OwnedParameter,
    ReduceCodec,
    ShardingConstraint,
    ShardStorage,
    StateDictAdapter,
    Stateful,
    StorageFactory,
)
from polyshard.plugins.validation import misfit
from polyshard.transport import Transport

if TYPE_CHECKING:
    from polyshard.sharding.layout import GroupLayout, ParameterLayout
    from polyshard.sharding.mesh import MeshRoles

T = TypeVar("T")
N = TypeVar("N", bound=Named)


@dataclass(frozen=True)
class GroupHook(Generic[T]):
    """A hook that is asked once for each group, and the class of its answers."""

    hook: str
    seam: type


@dataclass(frozen=True)
class Role(GroupHook[N]):
    """One that a single plugin may answer."""

    name: str
    """As plans and errors call it."""
    engine: Callable[[], N]
    """What the engine answers where no plugin does."""


COLLECTIVES = Role[CollectivesBackend](
    "polyshard_collectives_backend", CollectivesBackend, "collectives", DefaultBackend
)
GATHER_CODEC = Role[GatherCodec](
    "polyshard_gather_codec", GatherCodec, "gather codec", NativeGatherCodec
)
REDUCE_CODEC = Role[ReduceCodec](
    "polyshard_reduce_codec", ReduceCodec, "reduce codec", NativeReduceCodec
)
LANDING = Role[GradientLanding](
    "polyshard_gradient_landing", GradientLanding, "gradient landing", ShardLanding
)
STORAGE = Role[StorageFactory](
    "polyshard_shard_storage", StorageFactory, "shard storage", DeviceStorageFactory
)

ROLES: tuple[Role[Any], ...] = (COLLECTIVES, GATHER_CODEC, REDUCE_CODEC, LANDING, STORAGE)
"""Every exclusive hook about a group, in the order of plan lines."""

CONSTRAINTS = GroupHook[ShardingConstraint]("polyshard_sharding_constraint", ShardingConstraint)
OBSERVERS = GroupHook[Observer]("polyshard_observer", Observer)
ADAPTERS = GroupHook[StateDictAdapter]("polyshard_state_dict_adapter", StateDictAdapter)
STATES = GroupHook[Stateful]("polyshard_plugin_state", Stateful)

RANKS_MAY_DIFFER = frozenset({OBSERVERS.hook, STATES.hook, "polyshard_teardown"})
"""Hooks that change nothing of what ranks do together: a plugin that has no other may be passed on
some ranks only, or with other settings there."""


@dataclass(frozen=True)
class PluginLines:
    """One line per plugin, in order: name, version, settings."""

    compared: tuple[str, ...] = ()
    """What ranks must agree on."""
    local: tuple[str, ...] = ()
    """Plugins that only look on: shown, not compared."""


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What one plugin returned to a hook."""

    plugin: str
    """Its name."""
    label: str
    """Name and version, as errors call it."""
    value: T


@dataclass(frozen=True)
class Contributions:
    """Everything plugins add to one group, checked, ordered and frozen.

    A role holds the engine's own spec where no plugin claims it; the others are tuples in plugin
    order, empty when unused. The methods call specs and parts and check what they answer: one that
    answers something else than its seam asks for would not fail here but give wrong results, or
    differ between ranks. Errors name plugin, call and group.
    """

    group: GroupIdentity
    layers: Mapping[Role[Any], tuple[Named, ...]]
    """What takes each role, in the order of the table: wrappers first, the outermost before the
    others, and what they go around last."""
    constraints: tuple[ShardingConstraint, ...] = ()
    observers: tuple[Observer, ...] = ()
    adapters: tuple[StateDictAdapter, ...] = ()
    states: tuple[tuple[str, Stateful], ...] = ()
    """What checkpoints hold of each plugin, by its name."""
    lines: PluginLines = PluginLines()
    labels: tuple[tuple[object, str], ...] = ()
    """The plugin that each spec came from."""

    def __getitem__(self, role: Role[N]) -> N:
        """What takes ``role``."""
        return cast("N", self.layers[role][0])

    @property
    def notices(self) -> tuple[str, ...]:
        """What all specs say of the group, each text once."""
        specs: list[Named | Observer] = [p for layers in self.layers.values() for p in layers]
        specs += [*self.constraints, *self.adapters, *self.observers]
        return tuple(dict.fromkeys(notice for spec in specs for notice in spec.notices))

    def plugin_of(self, spec: object) -> str:
        """How an error calls the plugin that contributed ``spec``."""
        found = (label for owned, label in self.labels if owned is spec)
        own = spec.name if isinstance(spec, Named) else type(spec).__name__
        return f"plugin {next(found, repr(own))}"

    def refuse(self, spec: object, call: str, problem: str) -> NoReturn:
        """Raise, naming the plugin of ``spec``, the call and the group."""
        raise PluginError(f"{self.plugin_of(spec)}: {call} for group '{self.group}' {problem}")

    def _call(self, spec: object, function: Callable[..., T], *given: object) -> T:
        """``function(*given)``; an exception is noted to be that of the plugin of ``spec``."""
        try:
            return function(*given)
        except Exception as error:
            taken = self.layers.items()
            seams = (r.name for r, layers in taken if any(p is spec for p in layers))
            owner = type(getattr(function, "__self__", spec)).__name__
            error.add_note(
                f"raised by {self.plugin_of(spec)} in {owner}.{function.__name__}, its "
                f"{next(seams, 'sharding constraint')} for group '{self.group}'"
            )
            raise

    def _bound(self, role: Role[Any], part: type[T], group: GroupInfo, given: object) -> T | None:
        """What the spec in ``role`` binds to the group, which is a ``part`` if it is anything."""
        spec = self[role]
        made: T | None = self._call(spec, spec.bind, group, given)
        if made is not None and (problem := misfit(made, part)):
            self.refuse(spec, f"{type(spec).__name__}.bind", f"returned {problem}")
        return made

    # Codecs -----------------------------------------------------------------------------------

    def gather_codec(self, group: GroupInfo, layout: GroupLayout) -> BoundGatherCodec | None:
        """The gather codec of the group as it is now."""
        bound = self._bound(GATHER_CODEC, BoundGatherCodec, group, layout)  # type: ignore[type-abstract]
        if bound is not None:
            self._check_payload(self[GATHER_CODEC], bound)
        return bound

    def reduce_codec(self, group: GroupInfo, layout: GroupLayout) -> BoundReduceCodec | None:
        """The reduce codec of the group as it is now."""
        spec = self[REDUCE_CODEC]
        bound = self._bound(REDUCE_CODEC, BoundReduceCodec, group, layout)  # type: ignore[type-abstract]
        if bound is not None:
            self._check_payload(spec, bound)
            if bound.replicas is not None:
                if problem := misfit(bound.replicas, BoundReplicaCodec):
                    call = f"{type(spec).__name__}.bind(...).replicas"
                    self.refuse(spec, call, f"returned {problem}")
                self._check_payload(spec, bound.replicas)
        return bound

    def _check_payload(
        self, spec: Named, bound: BoundGatherCodec | BoundReduceCodec | BoundReplicaCodec
    ) -> None:
        nbytes: object = bound.payload_bytes
        if not _is_count(nbytes):
            call = f"{type(bound).__name__}.payload_bytes"
            fix = "give a whole number of bytes, equal on all ranks."
            self.refuse(spec, call, f"is {nbytes!r}; {fix}")

    # Storage ----------------------------------------------------------------------------------

    def storage(self, group: GroupInfo, layout: GroupLayout) -> ShardStorage:
        """Where the shard of the group rests."""
        made = self._bound(STORAGE, ShardStorage, group, layout)  # type: ignore[type-abstract]
        # The engine's own, which a spec that binds nothing leaves the group to.
        return made or DeviceStorageFactory().bind(group, layout)

    def rested(self, storage: ShardStorage, shard: Tensor) -> Tensor:
        """What ``storage`` keeps of a freshly cut ``shard``."""
        call, spec = f"{type(storage).__name__}.rest", self[STORAGE]
        resting: object = self._call(spec, storage.rest, shard)
        problem = _unlike(resting, shard)
        if problem or not isinstance(resting, Tensor):
            self.refuse(spec, call, f"returned {problem}; return the shard, where it rests.")
        if not _holds(resting, shard):
            self.refuse(spec, call, "returned a tensor of other values; copy the shard into it.")
        return resting

    def check_view(
        self, storage: ShardStorage, resting: Tensor, device: torch.device, *, may_cross: bool
    ) -> None:
        """Refuse a view that transfers cannot be bound to once.

        With ``may_cross`` a codec reads it, on the compute ``device`` or on the host.
        """
        if resting.is_meta:
            return
        view: object = storage.view()
        call, spec = f"{type(storage).__name__}.view", self[STORAGE]
        problem = _unlike(view, resting)
        if problem or not isinstance(view, Tensor):
            fix = "return what fetch() fills with the shard."
            self.refuse(spec, call, f"returned {problem}; {fix}")
        if view.device.type != device.type and not (may_cross and view.device.type == "cpu"):
            self.refuse(spec, call, f"returned a tensor on {view.device}, not on {device}.")
        if not _is_same_memory(view, storage.view()):
            self.refuse(
                spec,
                call,
                "returned another tensor when called again; transfers are bound to it once: "
                "always return the same one, and have fetch() fill it.",
            )

    def check_placed(self, storage: ShardStorage, given: Tensor, found: object) -> None:
        """Refuse what ``place_gradient`` made of a gradient ``given`` to it."""
        if problem := _unlike(found, given):
            call = f"{type(storage).__name__}.place_gradient"
            fix = "return the gradient, next to the resting shard."
            self.refuse(self[STORAGE], call, f"returned {problem}; {fix}")

    # Landing ----------------------------------------------------------------------------------

    def owners(self, group: GroupInfo) -> tuple[int | None, ...]:
        """The rank on which the gradient of each parameter lands whole, if it does."""
        landing = self[LANDING]
        found: Any = self._call(landing, landing.owners, group)
        count, ranks = len(group.parameters), group.mesh.size()
        is_list = isinstance(found, Sequence) and len(found) == count
        if not is_list or not all(o is None or (_is_count(o) and o < ranks) for o in found):
            self.refuse(
                landing,
                f"{type(landing).__name__}.owners",
                f"returned {found!r}; return, for each of {count} parameters, a position among the "
                f"{ranks} ranks of its mesh, or None.",
            )
        return tuple(found)

    def show(self, group: GroupInfo, parameters: Sequence[nn.Parameter]) -> None:
        """Show the landing of the group all parameters."""
        self._call(self[LANDING], self[LANDING].show, group, parameters)

    def hold(self, group: GroupInfo, owned: Sequence[OwnedParameter]) -> None:
        """Show the landing of the group what moves its parameters."""
        self._call(self[LANDING], self[LANDING].hold, group, owned)

    # Constraints and transports ---------------------------------------------------------------

    def check_constraints(self, group: GroupInfo, layout: GroupLayout) -> None:
        """Refuse a layout that would separate elements a plugin needs together.

        Raises:
            PluginError: listing every parameter and plugin concerned.
        """
        problems = []
        for constraint in self.constraints:
            for info, placed in zip(group.parameters, layout.parameters, strict=True):
                block: object = self._call(constraint, constraint.block_elements, info)
                if not isinstance(block, int) or not _is_count(block) or block < 1:
                    self.refuse(
                        constraint,
                        f"{type(constraint).__name__}.block_elements",
                        f"returned {block!r} for '{info.fqn}'; return a whole number of elements, "
                        "1 when anything goes.",
                    )
                run = contiguous_run(placed)
                if layout.world_size > 1 and run % block and placed.dim is not None:
                    problems.append(
                        f"{self.plugin_of(constraint)}: constraint '{constraint.name}' needs "
                        f"blocks of {block} elements of '{info.fqn}' {info.shape} of group "
                        f"'{self.group}' on one rank, but {layout.world_size} ranks part it every "
                        f"{run} elements. Choose another block, shard another dim, or leave the "
                        "parameter out."
                    )
        if problems:
            raise PluginError("\n".join(problems))

    def transport(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        """What the backend of the group moves bytes with."""
        spec = self[COLLECTIVES]
        made = self._bound(COLLECTIVES, Transport, group, roles)  # type: ignore[type-abstract]
        if made is None:
            self.refuse(spec, f"{type(spec).__name__}.bind", "returned None")
        if (made.rank, made.size) != (roles.shard_rank, roles.shard_size):
            self.refuse(
                spec,
                f"{type(spec).__name__}.bind",
                f"returned a transport of rank {made.rank} of {made.size}; the shard axis has "
                f"rank {roles.shard_rank} of {roles.shard_size}.",
            )
        if not _is_count(made.staging_bytes):
            call = f"{type(made).__name__}.staging_bytes"
            self.refuse(spec, call, f"is {made.staging_bytes!r}; give a whole number of bytes.")
        warn([notice for layer in self.layers[COLLECTIVES] for notice in layer.notices])
        return made


def contiguous_run(placed: ParameterLayout) -> int:
    """Elements between two places where ranks part, in the memory of the full parameter."""
    if placed.dim is None:
        return placed.numel
    return math.prod(placed.chunk_shape[placed.dim :])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _unlike(found: object, model: Tensor) -> str | None:
    """What keeps ``found`` from standing for the flat tensor ``model``; to read after "returned".

    Its device is left open: storages move what they are given.
    """
    if not isinstance(found, Tensor):
        return "None" if found is None else f"a {type(found).__name__}"
    if found.dtype != model.dtype:
        return f"{found.dtype} elements, not {model.dtype}"
    if found.shape != model.shape:
        return f"a tensor of shape {tuple(found.shape)}, not {tuple(model.shape)}"
    return None if found.is_contiguous() else "a tensor that is not contiguous"


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    same_storage = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return one is other or (same_storage and one.storage_offset() == other.storage_offset())


def _holds(resting: Tensor, shard: Tensor) -> bool:
    """Whether both hold the same bits, where that is cheap to see."""
    if resting is shard or resting.is_meta or resting.device != shard.device:
        return True
    if shard.untyped_storage().nbytes() < shard.nbytes:  # taken over, and given up since
        return True
    return torch.equal(resting.view(torch.uint8), shard.view(torch.uint8))


# Claims -------------------------------------------------------------------------------------------


def contributions_of(
    ask: Callable[[str], list[Answer[Any]]], engine: str, group: GroupInfo, lines: PluginLines
) -> Contributions:
    """Ask for ``group``: everything claimed, then checked, then frozen.

    Args:
        ask: gives the answers of plugins to a hook about ``group``, in plugin order.
        engine: name and version of what answers for a role that no plugin claims.
        group: what the plugins are asked about.
        lines: one a plugin, kept in the result.

    Raises:
        ConflictError: listing every role that two plugins claim.
        PluginError: listing every answer that is not what its hook asks for.
    """
    # State last: by then a plugin has made what it is kept in.
    rows: list[GroupHook[Any]] = [*ROLES, CONSTRAINTS, OBSERVERS, ADAPTERS, STATES]
    answers = {row.hook: ask(row.hook) for row in rows}
    claims = {r: [a for a in answers[r.hook] if not isinstance(a.value, Around)] for r in ROLES}
    wrappers = {r: [a for a in answers[r.hook] if isinstance(a.value, Around)] for r in ROLES}
    answers |= {role.hook: claims[role] for role in ROLES}
    problems = [
        f"plugin {answer.label}: {row.hook} returned {problem}"
        for row in rows
        for answer in answers[row.hook]
        if (problem := misfit(answer.value, row.seam))
    ]
    if problems:
        raise PluginError("\n".join(problems))
    conflicts = [_conflict(role, claims[role], group) for role in ROLES if len(claims[role]) > 1]
    if conflicts:
        raise ConflictError("\n".join(conflicts))
    for role in ROLES:
        inner = claims[role] or [Answer("", engine, role.engine())]
        answers[role.hook] = _nested(role, wrappers[role], inner[0], group)
    return Contributions(
        group.identity,
        layers={role: _values(answers[role.hook]) for role in ROLES},
        constraints=_values(answers[CONSTRAINTS.hook]),
        observers=_values(answers[OBSERVERS.hook]),
        adapters=_values(answers[ADAPTERS.hook]),
        states=tuple(_states(answers)),
        lines=lines,
        labels=tuple((a.value, a.label) for found in answers.values() for a in found),
    )


def _values(answers: Sequence[Answer[T]]) -> tuple[T, ...]:
    return tuple(answer.value for answer in answers)


def _states(answers: Mapping[str, Sequence[Answer[Any]]]) -> Iterator[tuple[str, Stateful]]:
    """What plugins say that they keep; for one that says nothing, its spec that can be saved.

    Raises:
        PluginError: for one with several of those, which would be saved under one name.
    """
    found = {answer.plugin: answer.value for answer in answers[STATES.hook]}
    said = frozenset(found)
    for answer in (a for hook in answers for a in answers[hook] if a.plugin not in said):
        if not isinstance(answer.value, Stateful):
            continue
        if found.setdefault(answer.plugin, answer.value) is not answer.value:
            raise PluginError(
                f"plugin {answer.label}: two of its parts have a state_dict(), and a plugin keeps "
                f"one state; give it in {STATES.hook}."
            )
    yield from found.items()


def _nested(
    role: Role[Any], wrappers: Sequence[Answer[Any]], inner: Answer[Any], group: GroupInfo
) -> list[Answer[Any]]:
    """What takes ``role``: the wrappers that do not stay out, in plugin order, then ``inner``.

    Raises:
        PluginError: for a wrapper that gives something else than a spec; and what it raises.
    """
    layers = [inner]
    for wrapper in reversed(wrappers):
        within, label = layers[0], wrapper.label
        called = f"'{within.value.name}' of plugin {within.label}"
        where = f"wrapping {called} as {role.name} of group '{group.identity}'"
        try:
            made = wrapper.value.make(within.value)
        except Exception as error:
            error.add_note(f"raised by plugin {label} in {role.hook}, {where}")
            raise
        if made is within.value:
            continue
        if problem := misfit(made, role.seam):
            raise PluginError(f"plugin {label}: {role.hook}, {where}, returned {problem}")
        layers.insert(0, Answer(wrapper.plugin, label, made))
    return layers


def _conflict(role: Role[Any], claims: Sequence[Answer[Any]], group: GroupInfo) -> str:
    plugins = " and ".join(claim.label for claim in claims)
    parameters = [p.fqn for p in group.parameters]
    shown = ", ".join(parameters[:4]) + (", ..." if len(parameters) > 4 else "")
    return (
        f"plugins {plugins} both claim the {role.name} of group '{group.identity}' ({shown}). Pass "
        "only one of them for this unit, or make one return None for this group, or "
        "polyshard.Around(...) to wrap the other."
    )
