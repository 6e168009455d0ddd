"""Plugins in one class: a plugin that is its own spec, and its own part of each group.

Each base is a plugin and a seam at once. Of codecs, storages and backends the engine takes a copy
of the plugin for each group that it serves, which knows its ``group`` and ``layout``: attributes
that :meth:`GroupPlugin.setup` assigns belong to that group, and what the constructor made is shared
by all. A plugin with several parts answers hooks with specs of its own instead.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from typing import Any, Self

from typing_extensions import override

from polyshard.errors import PluginError
from polyshard.plugins.contract import Plugin, contract_of, hookimpl, settings_of
from polyshard.plugins.seams import (
    BoundGatherCodec,
    BoundReduceCodec,
    CollectivesBackend,
    GatherCodec,
    GroupInfo,
    Observer,
    ReduceCodec,
    ShardStorage,
    StorageFactory,
)
from polyshard.sharding.layout import GroupLayout
from polyshard.sharding.mesh import MeshRoles
from polyshard.transport import Pending, Transport, WrappedTransport, choose_transport


class ServingPlugin(Plugin):
    """What all plugins in one class share."""

    def serves(self, group: GroupInfo) -> bool:
        """Whether ``group`` is this plugin's; others stay free for another one.

        ``group`` has no name yet: choose by its parameters.
        """
        return True

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse a class that is two of them: each group would get two copies.

        Raises:
            PluginError: saying what to write instead.
        """
        super().__init_subclass__(**arguments)
        bases = [b.__name__ for b in cls.__mro__ if "_is_base" in vars(b)]
        if len(bases) > 1:
            raise PluginError(
                f"{cls.__name__} is a {' and a '.join(bases)}, and a class can be one of them; "
                "write two plugins, or one Plugin whose hooks return specs (polyshard.GatherCodec, "
                "polyshard.StorageFactory, ...)."
            )


class GroupPlugin(ServingPlugin):
    """A plugin of which each group gets a copy: its spec, and what it is bound to."""

    group: GroupInfo
    """The group that this copy is for."""
    layout: GroupLayout
    """Where the parameters of the group rest."""
    notices: tuple[str, ...] = ()
    _made_for: object = None

    @property
    def settings(self) -> str:
        """The fields of a dataclass, which all ranks compare."""
        return settings_of(self)

    def setup(self) -> None:
        """Make what is kept for the group between its transfers: attributes of ``self``.

        Called when the group is first bound, and again only if its sizes, dtypes or device changed.
        A class with ``state_dict()`` and ``load_state_dict(state)`` is saved with
        :func:`polyshard.plugin_state_dict`, each group for itself.
        """

    def for_group(self, group: GroupInfo) -> Self | None:
        """A copy for ``group``, if it serves that."""
        if not self.serves(group):
            return None
        made = copy.copy(self)
        # Frozen settings stay frozen, other attributes may be set: so a dataclass has it for
        # instances of subclasses.
        object.__setattr__(made, "__class__", _copies(type(self)))  # type: ignore[arg-type]
        made.group = group
        if "name" not in dir(made):
            made.__dict__["name"] = contract_of(self).name
        return made

    def _bound(self, group: GroupInfo, layout: GroupLayout) -> Self:
        self.group, self.layout = group, layout
        sizes = (layout, group.orig_dtype, group.param_dtype, group.reduce_dtype, group.device)
        if self._made_for != sizes:
            self.setup()
            self._made_for = sizes
        return self


@functools.cache
def _copies(kind: type) -> type:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind)(kind.__name__, (kind,), names)


class CodecPlugin(GroupPlugin, ABC):
    """What codecs share."""

    payload_bytes: int

    @abstractmethod
    def payload_size(self) -> int | None:
        """Bytes every rank sends to each peer, equal on all ranks; ``None``: natively.

        Follows from ``self.group`` and ``self.layout``; called for each binding, after
        :meth:`setup`.
        """

    def bind(self, group: GroupInfo, layout: GroupLayout) -> Self | None:
        """Itself, for the group as it is now."""
        self._bound(group, layout)
        nbytes = self.payload_size()
        if nbytes is None:
            return None
        self.payload_bytes = nbytes
        return self


class GatherCodecPlugin(CodecPlugin, BoundGatherCodec, GatherCodec):
    """A plugin that decides what travels in all-gathers."""

    _is_base = True

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> GatherCodec | None:
        """A copy for ``group``."""
        return self.for_group(group)


class ReduceCodecPlugin(CodecPlugin, BoundReduceCodec, ReduceCodec):
    """A plugin that decides how gradients travel and are summed."""

    _is_base = True

    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> ReduceCodec | None:
        """A copy for ``group``."""
        return self.for_group(group)


class StoragePlugin(GroupPlugin, ShardStorage, StorageFactory):
    """A plugin that decides where shards rest."""

    def bind(self, group: GroupInfo, layout: GroupLayout) -> Self:
        """Itself, for the group."""
        return self._bound(group, layout)

    _is_base = True

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> StorageFactory | None:
        """A copy for ``group``."""
        return self.for_group(group)


class BackendPlugin(GroupPlugin, CollectivesBackend):
    """A plugin that decides how bytes move: by default as without it, watched by :meth:`started`.

    ``self.layout`` is not settled when a backend is bound.
    """

    def started(self, pending: Pending, sent_bytes: int) -> Pending:
        """A transfer has started, which sends ``sent_bytes``; return what is waited for."""
        return pending

    def bind(self, group: GroupInfo, roles: MeshRoles) -> Transport:
        """The engine's transport for the group, with :meth:`started` around its transfers."""
        inner = choose_transport(roles, group.device)
        return inner if inner.size == 1 else _Watched(inner, self)

    _is_base = True

    @hookimpl
    def polyshard_collectives_backend(self, group: GroupInfo) -> CollectivesBackend | None:
        """A copy for ``group``."""
        made = self.for_group(group)
        if made is not None:
            made.setup()
        return made


class _Watched(WrappedTransport):
    def __init__(self, inner: Transport, plugin: BackendPlugin) -> None:
        super().__init__(inner)
        self.name, self._plugin = f"{plugin.name} {inner.name}", plugin

    @override
    def started(self, pending: Pending, sent_bytes: int) -> Pending:
        return self._plugin.started(pending, sent_bytes)


class ObserverPlugin(ServingPlugin, Observer):
    """A plugin that watches: one object for all groups, which it is told by name."""

    _is_base = True

    @hookimpl
    def polyshard_observer(self, group: GroupInfo) -> Observer | None:
        """Itself."""
        return self if self.serves(group) else None
