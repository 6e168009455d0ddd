"""Which plugin takes which role of a group: claims, wrappers, and checks of what hooks return.

A new exclusive hook is a specification in :mod:`~polyshard.plugins.hookspecs` and a row here.
Claims, plans, ``describe()``, errors and the reference are made from the rows; code that uses a
spec reads it as ``contributions[ROW]``, which mypy knows the class of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar, cast

import torch
from torch import Tensor

from polyshard.errors import ConflictError, PluginError, warn
from polyshard.plugins.builtin import (
    DefaultBackend,
    DeviceStorageFactory,
    NativeCodec,
    ShardLanding,
)
from polyshard.plugins.member import THE_ENGINE, Member
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
    ReduceCodec,
    ShardingConstraint,
    ShardStorage,
    StateDictAdapter,
    Stateful,
    StorageFactory,
)
from polyshard.plugins.validation import misfit
from polyshard.sharding.rows import is_local_part
from polyshard.transport import Transport

if TYPE_CHECKING:
    from polyshard.sharding.layout import GroupLayout
    from polyshard.sharding.mesh import MeshRoles

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
N = TypeVar("N", bound=Named)
N_co = TypeVar("N_co", bound=Named, covariant=True)
Answers = list[tuple[Member, Any]]
"""What plugins returned to a hook, in plugin order."""


@dataclass(frozen=True)
class GroupHook(Generic[T_co]):
    """A hook that is asked once for each group, and the class of its answers."""

    hook: str
    seam: type


@dataclass(frozen=True)
class Role(GroupHook[N_co]):
    """One that a single plugin may answer."""

    name: str
    """As plans and errors call it."""
    engine: Callable[[], N_co]
    """What the engine answers where no plugin does."""
    part: type | None = None
    """The class of what its spec binds to a group."""


COLLECTIVES = Role[CollectivesBackend](
    "polyshard_collectives_backend", CollectivesBackend, "collectives", DefaultBackend, Transport
)
GATHER_CODEC = Role[GatherCodec](
    "polyshard_gather_codec", GatherCodec, "gather codec", NativeCodec, BoundGatherCodec
)
REDUCE_CODEC = Role[ReduceCodec](
    "polyshard_reduce_codec", ReduceCodec, "reduce codec", NativeCodec, BoundReduceCodec
)
LANDING = Role[GradientLanding](
    "polyshard_gradient_landing", GradientLanding, "gradient landing", ShardLanding
)
STORAGE = Role[StorageFactory](
    "polyshard_shard_storage", StorageFactory, "shard storage", DeviceStorageFactory, ShardStorage
)

ROLES: tuple[Role[Any], ...] = (COLLECTIVES, GATHER_CODEC, REDUCE_CODEC, LANDING, STORAGE)
"""Every exclusive hook about a group, in the order of plan lines."""

CONSTRAINTS = GroupHook[ShardingConstraint]("polyshard_sharding_constraint", ShardingConstraint)
OBSERVERS = GroupHook[Observer]("polyshard_observer", Observer)
ADAPTERS = GroupHook[StateDictAdapter]("polyshard_state_dict_adapter", StateDictAdapter)
STATES = GroupHook[Stateful]("polyshard_plugin_state", Stateful)

SIZES = ("payload_bytes", "staging_bytes")
"""What parts say in bytes, alike on all ranks."""


@dataclass(frozen=True)
class Contributions:
    """Everything plugins add to one group, checked, ordered and frozen.

    A role holds the engine's own spec where no plugin claims it; the others are tuples in plugin
    order, empty when unused. The methods call specs and parts and check what they answer: one that
    answers something else than its seam asks for would not fail here but give wrong results, or
    differ between ranks. Errors name plugin, call and group.
    """

    group: GroupIdentity
    members: tuple[Member, ...]
    """The plugins that were asked, in order."""
    answers: Mapping[GroupHook[Any], Answers]
    """The parts that take each role, in the order of the table: wrappers first, the outermost
    before the others, and what they wrap last. Then the answers to hooks that all may answer."""
    states: tuple[tuple[str, Stateful], ...] = ()
    """What checkpoints hold of each plugin, by its name."""

    def __getitem__(self, role: Role[N]) -> N:
        """What takes ``role``."""
        return cast("N", self.answers[role][0][1])

    def all(self, row: GroupHook[T]) -> tuple[T, ...]:
        """What answers the hook of ``row``: for a role, what takes it and what that wraps."""
        return tuple(value for _, value in self.answers[row])

    @property
    def notices(self) -> tuple[str, ...]:
        """What all specs say of the group, each text once."""
        rows = (row for row in self.answers if row is not STATES)
        found = (notice for row in rows for spec in self.all(row) for notice in spec.notices)
        return tuple(dict.fromkeys(found))

    def plugin_of(self, spec: object) -> str:
        """How an error calls the plugin that contributed ``spec``."""
        every = (pair for answers in self.answers.values() for pair in answers)
        own = spec.name if isinstance(spec, Named) else type(spec).__name__
        return f"plugin {next((m.label for m, owned in every if owned is spec), repr(own))}"

    def _refusal(self, spec: object, member: str, problem: str, part: object = None) -> PluginError:
        """About a ``member`` of ``spec``, or of its ``part``."""
        call = f"{type(spec if part is None else part).__name__}.{member}"
        return PluginError(f"{self.plugin_of(spec)}: {call} for group '{self.group}' {problem}")

    def call(self, spec: object, function: Callable[..., T], *given: object) -> T:
        """``function(*given)``; an exception is noted to be that of the plugin of ``spec``."""
        try:
            return function(*given)
        except Exception as error:
            seams = (role.name for role in ROLES if any(p is spec for p in self.all(role)))
            owner = type(getattr(function, "__self__", spec)).__name__
            error.add_note(
                f"raised by {self.plugin_of(spec)} in {owner}.{function.__name__}, its "
                f"{next(seams, 'sharding constraint')} for group '{self.group}'"
            )
            raise

    def bound(self, role: Role[Any], group: GroupInfo, given: object) -> Any:
        """The part that the spec in ``role`` binds to the group as it is now; or ``None``."""
        spec = self[role]
        assert role.part is not None
        made = self.call(spec, spec.bind, group, given)
        if made is None:
            return None
        if problem := misfit(made, role.part):
            raise self._refusal(spec, "bind", f"returned {problem}")
        parts = [made]
        if isinstance(made, BoundReduceCodec) and made.replicas is not None:
            if problem := misfit(made.replicas, BoundReplicaCodec):
                raise self._refusal(spec, "bind(...).replicas", f"returned {problem}")
            parts.append(made.replicas)
        for part, size in ((part, size) for part in parts for size in SIZES):
            nbytes: object = getattr(part, size, 0)
            if not _is_count(nbytes):
                problem = f"is {nbytes!r}; give a whole number of bytes, equal on all ranks."
                raise self._refusal(spec, size, problem, part)
        return made

    def storage(self, group: GroupInfo, layout: GroupLayout) -> ShardStorage:
        """Where the shard of the group rests."""
        made: ShardStorage | None = self.bound(STORAGE, group, layout)
        # The engine's own, which a spec that binds nothing leaves the group to.
        return made or DeviceStorageFactory().bind(group, layout)

    def rested(self, storage: ShardStorage, shard: Tensor) -> Tensor:
        """What ``storage`` keeps of a freshly cut ``shard``."""
        found = self.call(self[STORAGE], storage.rest, shard)
        fix = "return the shard, where it rests."
        resting = self.alike(storage, "rest", found, shard, fix)
        if not _holds(resting, shard):
            problem = "returned a tensor of other values; copy the shard into it."
            raise self._refusal(self[STORAGE], "rest", problem, storage)
        return resting

    def alike(
        self, storage: ShardStorage, method: str, found: object, model: Tensor, fix: str
    ) -> Tensor:
        """What a ``method`` of ``storage`` returned, which has to stand for the flat ``model``.

        Its device is left open: storages move what they are given.
        """
        if not isinstance(found, Tensor):
            problem = "None" if found is None else f"a {type(found).__name__}"
        elif found.dtype != model.dtype:
            problem = f"{found.dtype} elements, not {model.dtype}"
        elif found.shape != model.shape:
            problem = f"a tensor of shape {tuple(found.shape)}, not {tuple(model.shape)}"
        elif not found.is_contiguous():
            problem = "a tensor that is not contiguous"
        else:
            return found
        raise self._refusal(self[STORAGE], method, f"returned {problem}; {fix}", storage)

    def check_view(
        self, storage: ShardStorage, resting: Tensor, device: torch.device, *, may_cross: bool
    ) -> None:
        """Refuse a view that transfers cannot be bound to once.

        With ``may_cross`` a codec reads it, on the compute ``device`` or on the host.
        """
        if resting.is_meta:
            return
        fix = "return what fetch() fills with the shard."
        view, problem = self.alike(storage, "view", storage.view(), resting, fix), ""
        if view.device.type != device.type and not (may_cross and view.device.type == "cpu"):
            problem = f"returned a tensor on {view.device}, not on {device}."
        elif not is_local_part(storage.view(), view):
            problem = (
                "returned another tensor when called again; transfers are bound to it once: "
                "always return the same one, and have fetch() fill it."
            )
        if problem:
            raise self._refusal(self[STORAGE], "view", problem, storage)

    def owners(self, group: GroupInfo) -> tuple[int | None, ...]:
        """The rank on which the gradient of each parameter lands whole, if it does."""
        landing = self[LANDING]
        found: Any = self.call(landing, landing.owners, group)
        count, ranks = len(group.parameters), group.mesh.size()
        is_list = isinstance(found, Sequence) and len(found) == count
        if not is_list or not all(o is None or (_is_count(o) and o < ranks) for o in found):
            problem = (
                f"returned {found!r}; return, for each of {count} parameters, a position among the "
                f"{ranks} ranks of its mesh, or None."
            )
            raise self._refusal(landing, "owners", problem)
        return tuple(found)

    def check_constraints(self, group: GroupInfo, layout: GroupLayout) -> None:
        """Refuse a layout that would separate elements plugins need together, listing them all."""
        problems = []
        for constraint in self.all(CONSTRAINTS):
            for info, placed in zip(group.parameters, layout.parameters, strict=True):
                block: object = self.call(constraint, constraint.block_elements, info)
                if not _is_count(block) or block < 1:
                    problem = (
                        f"returned {block!r} for '{info.fqn}'; return a whole number of elements, "
                        "1 when anything goes."
                    )
                    raise self._refusal(constraint, "block_elements", problem)
                if layout.world_size == 1 or placed.dim is None:
                    continue
                run = math.prod(placed.chunk_shape[placed.dim :])  # in the full parameter's memory
                if run % block:
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
        made: Transport | None = self.bound(COLLECTIVES, group, roles)
        if made is None:
            raise self._refusal(spec, "bind", "returned None")
        if (made.rank, made.size) != (roles.shard_rank, roles.shard_size):
            problem = (
                f"returned a transport of rank {made.rank} of {made.size}; the shard axis has "
                f"rank {roles.shard_rank} of {roles.shard_size}."
            )
            raise self._refusal(spec, "bind", problem)
        warn([notice for layer in self.all(COLLECTIVES) for notice in layer.notices])
        return made


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _holds(resting: Tensor, shard: Tensor) -> bool:
    """Whether both hold the same bits, where that is cheap to see."""
    if resting is shard or resting.is_meta or resting.device != shard.device:
        return True
    if shard.untyped_storage().nbytes() < shard.nbytes:  # taken over, and given up since
        return True
    return torch.equal(resting.view(torch.uint8), shard.view(torch.uint8))


def contributions_of(
    ask: Callable[[str], Answers], group: GroupInfo, members: tuple[Member, ...]
) -> Contributions:
    """Ask for ``group``: everything claimed, then checked, then frozen.

    Raises:
        ConflictError: listing every role that two plugins claim.
        PluginError: listing every answer that is not what its hook asks for.
    """
    # State last: by then a plugin has made what it is kept in.
    rows: list[GroupHook[Any]] = [*ROLES, CONSTRAINTS, OBSERVERS, ADAPTERS, STATES]
    answers = {row: ask(row.hook) for row in rows}
    claims = {r: [a for a in answers[r] if not isinstance(a[1], Around)] for r in ROLES}
    problems = [
        f"plugin {member.label}: {row.hook} returned {problem}"
        for row, given in (answers | claims).items()
        for member, value in given
        if (problem := misfit(value, row.seam))
    ]
    if problems:
        raise PluginError("\n".join(problems))
    if conflicts := [_conflict(r, claims[r], group) for r in ROLES if len(claims[r]) > 1]:
        raise ConflictError("\n".join(conflicts))
    for role in ROLES:
        inner = claims[role] or [(THE_ENGINE, role.engine())]
        answers[role] = _nested(role, answers[role], inner, group)
    return Contributions(group.identity, members, answers, tuple(_states(answers)))


def _states(answers: Mapping[GroupHook[Any], Answers]) -> Iterator[tuple[str, Stateful]]:
    """What plugins say that they keep; for one that says nothing, its one spec with state."""
    found = {member.name: value for member, value in answers[STATES]}
    said = frozenset(found)
    for member, value in (answer for row in answers for answer in answers[row]):
        if member.name in said or not isinstance(value, Stateful):
            continue
        if found.setdefault(member.name, value) is not value:
            raise PluginError(
                f"plugin {member.label}: two of its parts have a state_dict(), and a plugin keeps "
                f"one state; give it in {STATES.hook}."
            )
    yield from found.items()


def _nested(role: Role[Any], given: Answers, inner: Answers, group: GroupInfo) -> Answers:
    """What takes ``role``: wrappers that do not stay out, in plugin order, then ``inner``."""
    layers = list(inner)
    for wrapper, around in reversed(given):
        if not isinstance(around, Around):
            continue
        within, spec = layers[0]
        called = f"'{spec.name}' of plugin {within.label}"
        where = f"wrapping {called} as {role.name} of group '{group.identity}'"
        try:
            made = around.make(spec)
        except Exception as error:
            error.add_note(f"raised by plugin {wrapper.label} in {role.hook}, {where}")
            raise
        if problem := None if made is spec else misfit(made, role.seam):
            raise PluginError(f"plugin {wrapper.label}: {role.hook}, {where}, returned {problem}")
        if made is not spec:
            layers.insert(0, (wrapper, made))
    return layers


def _conflict(role: Role[Any], claims: Answers, group: GroupInfo) -> str:
    plugins = " and ".join(member.label for member, _ in claims)
    parameters = [p.fqn for p in group.parameters]
    shown = ", ".join(parameters[:4]) + (", ..." if len(parameters) > 4 else "")
    return (
        f"plugins {plugins} both claim the {role.name} of group '{group.identity}' ({shown}). Pass "
        "only one of them for this unit, or make one return None for this group, or "
        "polyshard.Around(...) to wrap the other."
    )
