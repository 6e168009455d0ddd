"""The hooks about a group as one table: what each is called, its seam, what the engine answers.

A new exclusive hook is a specification in :mod:`~polyshard.plugins.hookspecs` and a row here.
Claims, plans, ``describe()``, errors and the reference are made from the rows; code that uses the
part reads it as ``contributions[ROW]``, which mypy knows the class of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from polyshard.plugins.builtin import (
    DefaultBackend,
    DeviceStorageFactory,
    NativeGatherCodec,
    NativeReduceCodec,
    ShardLanding,
)
from polyshard.plugins.seams import (
    CollectivesBackend,
    GatherCodec,
    GradientLanding,
    Named,
    Observer,
    ReduceCodec,
    ShardingConstraint,
    StateDictAdapter,
    Stateful,
    StorageFactory,
)

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
class Contributions:
    """Everything plugins add to one group, checked, ordered and frozen.

    A role holds the engine's own object where no plugin claims it; the others are tuples in plugin
    order, empty when unused.
    """

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
    """The plugin that each part came from: name and version, as errors call it."""

    def __getitem__(self, role: Role[N]) -> N:
        """What takes ``role``."""
        return cast("N", self.layers[role][0])

    @property
    def gather_codec(self) -> GatherCodec:
        """What travels in all-gathers."""
        return self[GATHER_CODEC]

    @property
    def reduce_codec(self) -> ReduceCodec:
        """How gradients travel."""
        return self[REDUCE_CODEC]

    @property
    def landing(self) -> GradientLanding:
        """Which gradients land whole on an owner."""
        return self[LANDING]

    @property
    def storage(self) -> StorageFactory:
        """Where shards rest."""
        return self[STORAGE]

    @property
    def backend(self) -> CollectivesBackend:
        """How bytes move."""
        return self[COLLECTIVES]

    @property
    def notices(self) -> tuple[str, ...]:
        """What all parts say of the group, each text once."""
        parts: list[Named | Observer] = [p for layers in self.layers.values() for p in layers]
        parts += self.constraints
        parts += [*self.adapters, *self.observers]
        return tuple(dict.fromkeys(notice for part in parts for notice in part.notices))

    def seam_of(self, part: object) -> str:
        """What ``part`` is for the group, as errors call it."""
        taken = self.layers.items()
        role = next((role.name for role, layers in taken if any(p is part for p in layers)), None)
        return role or "sharding constraint"

    def plugin_of(self, part: object) -> str:
        """How an error calls the plugin that contributed ``part``."""
        found = (label for owned, label in self.labels if owned is part)
        own = part.name if isinstance(part, Named) else type(part).__name__
        return f"plugin {next(found, repr(own))}"
