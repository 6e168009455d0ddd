"""Where shards rest between uses."""

# ruff: noqa: B027  (an empty method is a default)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from polyshard.plugins.base import Named
from polyshard.plugins.info import GroupInfo

if TYPE_CHECKING:
    from polyshard.sharding.layout import GroupLayout


class ShardStorage(ABC):
    """Where one group's shard rests between uses (device, host, disk)."""

    prefetch_units: int = 0
    """Units whose shards may be brought near ahead of the one that computes; with 0,
    :meth:`prefetch` is not called."""

    holds_gradients: bool = False
    """Have gradients of backwards that ``set_is_last_backward(False)`` says are not the last add up
    on the device, and :meth:`place_gradient` get their sum."""

    @abstractmethod
    def rest(self, shard: Tensor) -> Tensor:
        """Take over a freshly built shard buffer; return the tensor the optimizer will see."""

    @abstractmethod
    def view(self) -> Tensor:
        """``[shard_numel]`` on the compute device: what :meth:`fetch` fills. Always one tensor.

        Transfers are bound to it once, so its memory may come and go but not its storage. Views of
        it are made whenever it is asked for: it must have memory then, if not yet its values.
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
        comes: in padding, and for parameters without one.
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


class StorageFactory(Named, ABC):
    """Decides where shards rest. Exclusive per group."""

    @abstractmethod
    def create(self, group: GroupInfo, layout: GroupLayout) -> ShardStorage:
        """A storage for one group."""
