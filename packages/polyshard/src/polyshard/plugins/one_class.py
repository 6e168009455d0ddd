"""Plugins in one class: the plugin is also its spec and its part of each group.

For codecs, storages and backends, the engine copies the plugin for each group that it serves. A
copy has ``group`` and ``layout``; attributes that :meth:`GroupPlugin.setup` assigns belong to that
group, and all copies share those of the constructor. For several parts, return specs from hooks.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from typing import Any, Self, TypeVar

from typing_extensions import override

from polyshard.errors import PluginError
from polyshard.plugins.contract import Plugin, contract_of, hookimpl, settings_of
from polyshard.plugins.seams import (
    BoundGatherCodec,
    BoundReduceCodec,
    CollectivesBackend,
    GatherCodec,
    GroupInfo,
    Named,
    Observer,
    ReduceCodec,
    ShardStorage,
    StorageFactory,
)
from polyshard.sharding.layout import GroupLayout
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport import Pending, Transport, WrappedTransport, choose_transport

G = TypeVar("G", bound="GroupPlugin")


class ServingPlugin(Plugin):
    """Base of all plugins in one class."""

    def serves(self, group: GroupInfo) -> bool:
        """Whether this plugin serves ``group``; other plugins may serve the rest.

        ``group`` has no name yet: choose by its parameters.
        """
        return True

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse a class with two of these bases: each group would get two copies."""
        super().__init_subclass__(**arguments)
        ours = (b for b in cls.__mro__ if b.__module__ == __name__)
        bases = [b.__name__ for b in ours if any(n.startswith("polyshard_") for n in vars(b))]
        if len(bases) > 1:
            raise PluginError(
                f"{cls.__name__} is a {' and a '.join(bases)}, and a class can be one of them; "
                "write two plugins, or one Plugin whose hooks return specs (polyshard.GatherCodec, "
                "polyshard.StorageFactory, ...)."
            )


class GroupPlugin(ServingPlugin, Named):
    """A plugin that the engine copies for each group: spec and part in one object."""

    group: GroupInfo
    """The group of this copy."""
    layout: GroupLayout
    """Positions of the parameters in the buffers of the group."""
    _made_for: object = None

    @property
    @override
    def settings(self) -> str:
        """The fields of a dataclass, which all ranks compare."""
        return settings_of(self)

    def setup(self) -> None:
        """Create the state of the group that lives between transfers, as attributes of ``self``.

        Called when the group is first bound, and again only if its sizes, dtypes or device changed.
        :func:`polyshard.plugin_state_dict` saves each copy that has ``state_dict()`` and
        ``load_state_dict(state)``.
        """

    def _bound(self, group: GroupInfo, layout: GroupLayout) -> Self:
        self.group, self.layout = group, layout
        sizes = (layout, group.orig_dtype, group.param_dtype, group.reduce_dtype, group.device)
        if self._made_for != sizes:
            self.setup()
            self._made_for = sizes
        return self


@hookimpl
def _for_group(self: G, group: GroupInfo) -> G | None:
    """A copy for ``group``, or ``None`` if the plugin does not serve it."""
    if not self.serves(group):
        return None
    made = copy.copy(self)
    # Frozen settings stay frozen, other attributes may be set: so a dataclass has it for instances
    # of subclasses.
    object.__setattr__(made, "__class__", _copies(type(self)))  # type: ignore[arg-type]
    made.group = group
    if "name" not in dir(made):
        made.__dict__["name"] = contract_of(self).name
    return made


@functools.cache
def _copies(kind: type) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (kind,), names)


class CodecPlugin(GroupPlugin, ABC):
    """Base of codecs."""

    payload_bytes: int

    @abstractmethod
    def payload_size(self) -> int | None:
        """Return the bytes sent to each peer, equal on all ranks; ``None`` for the native codec.

        Use ``self.group`` and ``self.layout``. Called for each binding, after :meth:`setup`.
        """

    def bind(self, group: GroupInfo, layout: GroupLayout) -> Self | None:
        """Bind this copy to the current group."""
        self._bound(group, layout)
        nbytes = self.payload_size()
        if nbytes is None:
            return None
        self.payload_bytes = nbytes
        return self


class GatherCodecPlugin(CodecPlugin, BoundGatherCodec, GatherCodec):
    """Base of plugins that encode and decode all-gathers."""

    polyshard_gather_codec = _for_group


class ReduceCodecPlugin(CodecPlugin, BoundReduceCodec, ReduceCodec):
    """Base of plugins that encode and sum gradients."""

    polyshard_reduce_codec = _for_group


class StoragePlugin(GroupPlugin, ShardStorage, StorageFactory):
    """Base of plugins that store shards."""

    polyshard_shard_storage = _for_group

    def bind(self, group: GroupInfo, layout: GroupLayout) -> Self:
        """Bind this copy to the group."""
        return self._bound(group, layout)


class BackendPlugin(GroupPlugin, CollectivesBackend):
    """Base of plugins that change transfers: by default the engine's, passed to :meth:`started`.

    ``self.layout`` is not known when a backend is bound.
    """

    polyshard_collectives_backend = _for_group

    def started(self, pending: Pending, sent_bytes: int) -> Pending:
        """Called after a transfer of ``sent_bytes`` started; return the object to wait for."""
        return pending

    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        """Return the engine's transport for the group, with transfers passed to :meth:`started`."""
        self.setup()
        inner = choose_transport(roles, group.device)
        return inner if inner.size == 1 else _Watched(inner, self)


class _Watched(WrappedTransport):
    def __init__(self, inner: Transport, plugin: BackendPlugin) -> None:
        super().__init__(inner)
        self.name, self._plugin = f"{plugin.name} {inner.name}", plugin

    @override
    def started(self, pending: Pending, sent_bytes: int) -> Pending:
        return self._plugin.started(pending, sent_bytes)


class ObserverPlugin(ServingPlugin, Observer):
    """Base of observers: one object for all groups, whose methods get the name of a group."""

    @hookimpl
    def polyshard_observer(self, group: GroupInfo) -> Observer | None:
        """Return the plugin itself."""
        return self if self.serves(group) else None
