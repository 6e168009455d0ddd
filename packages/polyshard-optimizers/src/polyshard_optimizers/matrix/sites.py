"""Where updates of a parameter are made, and what brings gradients there and rows back.

[Note: sites]
A gradient lands whole on one rank, the owner (:class:`OnOwner`); where other axes of the mesh
divide it, its parts are put together beside that (see [Note: leads]). But what consists of whole
blocks needs no such journey, for these are matrices of their own: parts of that kind are left
apart, and of shards of that kind every rank updates its own (:class:`InRows`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from polyshard.plugins.seams import OwnedParameter, local_of
from polyshard.transport.base import Pending
from polyshard_optimizers.matrix.choosing import Cut
from polyshard_optimizers.matrix.parts import Parts

Lead = Callable[[OwnedParameter, Cut, Parts], tuple[int, ...]]
"""Says which place puts parts together."""


@dataclass(frozen=True)
class Chosen:
    """A parameter that holds matrices; what moves it, if it has an owner."""

    name: str
    parameter: nn.Parameter
    cut: Cut
    rows: tuple[int, int]
    """Of this rank's shard, where it has none."""
    data_axes: int
    """Of its mesh, those of data parallelism: they come first."""
    owned: OwnedParameter | None = None


class Site(ABC):
    """See [Note: sites]. What moves something is called on all ranks of the mesh, in one order."""

    parameter: nn.Parameter
    name: str
    cut: Cut
    """What this rank makes updates of, where it does."""
    first: int = 0
    """The first of these blocks, among those of the parameter."""
    makes: bool
    """Whether this rank does."""
    who: tuple[int, ...] = ()
    """Which rank does; nothing where each does its own."""

    @abstractmethod
    def gradient(self) -> Tensor | None:
        """Of the blocks, where this rank makes their update."""

    @abstractmethod
    def gather(self, rows: Tensor) -> Tensor | None:
        """The blocks in what all ranks have ``rows`` of, where this rank makes their update."""

    @abstractmethod
    def scatter(self, whole: Tensor | None, dtype: torch.dtype) -> Callable[[], Tensor]:
        """Begin to bring rows of what was made of the blocks to all ranks."""

    @property
    def begins_early(self) -> bool:
        """Whether the update can begin as soon as the gradient has landed."""
        return False

    @property
    def begins_at(self) -> OwnedParameter | None:
        """What moves the gradient, if so and this rank makes the update."""
        return None


class InRows(Site):
    """Every rank's shard is whole blocks: nothing moves."""

    def __init__(self, chosen: Chosen) -> None:
        """``chosen`` has no owner."""
        self.parameter, self.name = chosen.parameter, chosen.name
        start, stop = chosen.rows
        self.first, count = chosen.cut.within(chosen.parameter.shape[0], start, stop)
        self.cut, self.makes = Cut(count, chosen.cut.shape), count > 0

    @override
    def gradient(self) -> Tensor | None:
        assert self.parameter.grad is not None
        return local_of(self.parameter.grad)

    @override
    def gather(self, rows: Tensor) -> Tensor | None:
        return rows

    @override
    def scatter(self, whole: Tensor | None, dtype: torch.dtype) -> Callable[[], Tensor]:
        local = local_of(self.parameter)
        rows = whole.to(dtype).view(local.shape) if whole is not None else None
        return lambda: local.new_empty(0, dtype=dtype) if rows is None else rows


class OnOwner(Site):
    """Gradients land on an owner; parts of them are put together or left apart beside it."""

    def __init__(self, chosen: Chosen, owned: OwnedParameter, lead: Lead) -> None:
        """``lead`` is asked where parts are to be put together.

        Raises:
            MatrixError: for parts that cannot be.
        """
        self.parameter, self.name, self.cut = owned.parameter, chosen.name, chosen.cut
        self._owned, self._parts = owned, _parts_of(chosen, owned.parameter)
        self.who, self.makes = (owned.owner,), owned.is_owner
        self._leads: tuple[int, ...] = ()
        parts = self._parts
        if parts is None:
            return
        extent = self.parameter.shape[0]
        if parts.keep_together(chosen.cut.rows(extent)):
            start, self._parts = parts.offset(), None
            self.first, count = chosen.cut.within(extent, start, start + owned.shape[0])
            self.cut, self.makes = Cut(count, chosen.cut.shape), owned.is_owner and count > 0
            return
        self._leads = lead(owned, chosen.cut, parts)
        self.who = (owned.owner, *self._leads)
        is_lead = all(a.here == at for a, at in zip(parts.axes, self._leads, strict=True))
        self.makes = owned.is_owner and is_lead

    @property
    @override
    def begins_early(self) -> bool:
        return self._parts is None or not self._parts.are_divided

    @property
    @override
    def begins_at(self) -> OwnedParameter | None:
        return self._owned if self.makes and self.begins_early else None

    @override
    def gradient(self) -> Tensor | None:
        if self._owned.has_landed():
            return self._together(self._owned.gradient())
        assert self.parameter.grad is not None
        return self.gather(local_of(self.parameter.grad))

    @override
    def gather(self, rows: Tensor) -> Tensor | None:
        return self._together(self._owned.gather(rows))

    def _together(self, part: Tensor | None) -> Tensor | None:
        if self._parts is None or part is None:
            return part
        return self._parts.gather(part, self._leads)

    @override
    def scatter(self, whole: Tensor | None, dtype: torch.dtype) -> Callable[[], Tensor]:
        leaving: list[Pending] = []
        if self._owned.is_owner:
            empty = torch.empty(0, dtype=dtype, device=self.parameter.device)
            if self._parts is not None:
                given = None if whole is None else whole.to(dtype).view(self._parts.shapes[0])
                whole, leaving = self._parts.scatter(given, self._leads, empty)
            elif whole is None:
                whole = empty.new_empty(self._owned.shape)  # no block is in the part of this rank
        rows = self._owned.scatter(whole, dtype)

        def returned() -> Tensor:
            for pending in leaving:
                pending.wait()
            return rows()

        return returned


def site_of(chosen: Chosen, lead: Lead) -> Site:
    """Where updates of a parameter are made."""
    if chosen.owned is None:
        return InRows(chosen)
    return OnOwner(chosen, chosen.owned, lead)


def _parts_of(chosen: Chosen, parameter: nn.Parameter) -> Parts | None:
    """On axes beyond those of data parallelism, if there are any of more than one rank."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim == chosen.data_axes:
        return None
    parts = Parts(parameter, chosen.data_axes, chosen.name)
    return parts if parts.axes else None
