"""Codecs in one class: a plugin that is its own codec.

The base answers the hook, and makes what the engine asks for of each group; name, version and
settings are the plugin's. The long way (:class:`~polyshard.plugins.seams.GatherCodec` and what it binds)
stays for codecs that choose among several forms, or that own the second hop of a reduction.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor
from typing_extensions import override

from polyshard.errors import PluginError
from polyshard.plugins.contract import Plugin, contract_of, hookimpl, settings_of
from polyshard.plugins.validation import wordless
from polyshard.plugins.seams import (
    BoundGatherCodec,
    BoundReduceCodec,
    GatherCodec,
    GroupIdentity,
    GroupInfo,
    ReduceCodec,
    Stateful,
)
from polyshard.sharding.layout import GroupLayout


@dataclass
class CodecGroup:
    """One group of a codec plugin: what its methods are called about.

    ``state`` is what the plugin's ``new_state`` made, for this group alone; it may be replaced.
    """

    group: GroupInfo
    layout: GroupLayout
    state: Any = None


class CodecPlugin(Plugin, ABC):
    """What :class:`GatherCodecPlugin` and :class:`ReduceCodecPlugin` share."""

    def serves(self, group: GroupInfo) -> bool:
        """Whether ``group`` is this plugin's; others stay free for another one."""
        del group
        return True

    @abstractmethod
    def payload_bytes(self, group: GroupInfo, layout: GroupLayout) -> int | None:
        """Bytes every rank sends to each peer, equal on all ranks; ``None``: natively."""

    def new_state(self, group: GroupInfo, layout: GroupLayout) -> Any:
        """What is kept for one group between its transfers: ``at.state`` of the other methods.

        Made when the group is first bound, and again only if its sizes, dtypes or device changed.
        One that has ``state_dict()`` and ``load_state_dict(state)`` is saved with
        :func:`polyshard.plugin_state_dict`.
        """
        del group, layout

    @hookimpl
    def polyshard_plugin_state(self, group: GroupInfo) -> Stateful | None:
        """What :meth:`new_state` made for ``group``, if it can be saved."""
        served = self._served.get(group.identity)
        if served is None or type(self).new_state is CodecPlugin.new_state:
            return None
        return _State(served)

    @functools.cached_property
    def _served(self) -> WeakKeyDictionary[GroupIdentity, _Served]:
        """By group, and as long as there is one."""
        return WeakKeyDictionary()

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse a class that is both: the methods of one would do for the other.

        Raises:
            PluginError: saying what to write instead.
        """
        super().__init_subclass__(**arguments)
        if sum(CodecPlugin in base.__bases__ for base in cls.__mro__) > 1:
            raise PluginError(
                f"{cls.__name__} is a GatherCodecPlugin and a ReduceCodecPlugin, whose encode() "
                "have one name; write two plugins, or give each hook a codec of its own "
                "(polyshard.GatherCodec, polyshard.ReduceCodec)."
            )


class _Served:
    """What one plugin is for one group, however often that is bound."""

    notices: tuple[str, ...] = ()

    def __init__(self, plugin: Any) -> None:
        self.plugin = plugin
        self.name = contract_of(plugin).name
        self.settings = settings_of(plugin)
        self._made_for: Hashable = None
        self.at: CodecGroup | None = None

    def bound_to(self, group: GroupInfo, layout: GroupLayout) -> CodecGroup:
        """``group`` as it is now, with the state that it has had."""
        sizes = (layout, group.orig_dtype, group.param_dtype, group.reduce_dtype, group.device)
        if self.at is None or self._made_for != sizes:
            state = self.plugin.new_state(group, layout)
        else:
            state = self.at.state
        self._made_for = sizes
        self.at = CodecGroup(group, layout, state)
        return self.at


class _State:
    """The state of one group in a checkpoint."""

    def __init__(self, served: _Served) -> None:
        self._served = served

    def _kept(self) -> Stateful | None:
        at = self._served.at
        return at.state if at is not None and isinstance(at.state, Stateful) else None

    def state_dict(self) -> dict[str, Any]:
        """That of the plugin's own object; nothing where it cannot be saved."""
        kept = self._kept()
        return {} if kept is None else kept.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the plugin's own object."""
        kept = self._kept()
        if kept is not None:
            kept.load_state_dict(state_dict)


class GatherCodecPlugin(CodecPlugin):
    """A plugin that decides what travels in all-gathers: all there is to write.

    ``at`` says which group it is: ``at.group``, ``at.layout``, and ``at.state``, which is its own.
    """

    keeps_payload: ClassVar[bool] = False
    """Have the engine keep this rank's payload between gathers, and call :meth:`encode` only after
    the shard changed."""

    @abstractmethod
    def encode(self, shard: Tensor, payload: Tensor, at: CodecGroup) -> None:
        """Write ``shard`` (``[shard_numel]``, original dtype) into ``payload`` (uint8)."""

    @abstractmethod
    def decode(self, payloads: Tensor, regions: Sequence[Tensor], at: CodecGroup) -> None:
        """Fill each parameter's ``[W, chunk_numel]`` region (param dtype) from all payloads.

        ``payloads`` is ``[W, payload_bytes]`` uint8 in rank order. A region may be a strided view.
        The owner's own chunk is decoded too: every rank must compute with the same values.
        """

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> GatherCodec | None:
        """This plugin, for ``group`` alone."""
        if not self.serves(group):
            return None
        made = self._served[group.identity] = _ServedGather(self)
        return made


class ReduceCodecPlugin(CodecPlugin):
    """A plugin that decides how gradients travel and are summed: all there is to write.

    ``at`` says which group it is: ``at.group``, ``at.layout``, and ``at.state``, which is its own.
    """

    def begin(self, present: frozenset[int], at: CodecGroup) -> None:
        """A reduction starts: these parameters have a gradient, by index, the same on all ranks."""

    @abstractmethod
    def encode(self, chunks: Sequence[Tensor], payloads: Tensor, at: CodecGroup) -> None:
        """Write each parameter's ``[W, chunk_numel]`` gradient chunks into ``[W, bytes]`` uint8.

        Chunks are in the reduce dtype, zero where a parameter got no gradient. They may be the
        memory autograd wrote, or one zero expanded: read them only.
        """

    @abstractmethod
    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor], at: CodecGroup) -> None:
        """Sum the ``W`` received payloads into each ``[chunk_numel]`` out (reduce dtype).

        ``payloads[r]`` came from rank ``r``. Sum in rank order, so that results are deterministic.
        Averaging is the engine's: return plain sums.
        """

    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> ReduceCodec | None:
        """This plugin, for ``group`` alone."""
        if not self.serves(group):
            return None
        made = self._served[group.identity] = _ServedReduce(self)
        return made


# What the engine meets ----------------------------------------------------------------------------


class _ServedGather(_Served, GatherCodec):
    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> _Gather | None:
        nbytes = self.plugin.payload_bytes(group, layout)
        return (
            None if nbytes is None else _Gather(self.plugin, self.bound_to(group, layout), nbytes)
        )


class _ServedReduce(_Served, ReduceCodec):
    @override
    def bind(self, group: GroupInfo, layout: GroupLayout) -> _Reduce | None:
        nbytes = self.plugin.payload_bytes(group, layout)
        return (
            None if nbytes is None else _Reduce(self.plugin, self.bound_to(group, layout), nbytes)
        )


class _Gather(BoundGatherCodec):
    def __init__(self, plugin: GatherCodecPlugin, at: CodecGroup, nbytes: int) -> None:
        self.payload_bytes = nbytes
        self.keeps_payload = plugin.keeps_payload
        self._plugin: Any = plugin  # its answers are looked at, though there should be none
        self._at = at

    @override
    def encode(self, shard: Tensor, payload: Tensor) -> None:
        wordless(self._plugin.encode(shard, payload, self._at), self._plugin, "encode")

    @override
    def decode(self, payloads: Tensor, regions: Sequence[Tensor]) -> None:
        wordless(self._plugin.decode(payloads, regions, self._at), self._plugin, "decode")


class _Reduce(BoundReduceCodec):
    def __init__(self, plugin: ReduceCodecPlugin, at: CodecGroup, nbytes: int) -> None:
        self.payload_bytes = nbytes
        self._plugin: Any = plugin
        self._at = at

    @override
    def begin(self, present: frozenset[int]) -> None:
        self._plugin.begin(present, self._at)

    @override
    def encode(self, chunks: Sequence[Tensor], payloads: Tensor) -> None:
        wordless(self._plugin.encode(chunks, payloads, self._at), self._plugin, "encode")

    @override
    def decode_sum(self, payloads: Tensor, outs: Sequence[Tensor]) -> None:
        wordless(self._plugin.decode_sum(payloads, outs, self._at), self._plugin, "decode_sum")
