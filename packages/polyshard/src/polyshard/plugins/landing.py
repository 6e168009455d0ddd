"""Where gradients land: on shards, or whole on the rank that owns them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from polyshard.plugins.base import Named
from polyshard.plugins.info import GroupInfo, ParamInfo


class Rows(Protocol):
    """Rows of an owner on their way to this rank."""

    def wait(self) -> Tensor:
        """This rank's rows, in the shape of its shard. Call exactly once; all ranks alike."""
        ...


class OwnedParameter(Protocol):
    """A parameter whose gradient lands whole on one rank; the engine makes it.

    Calls that move something are made on all ranks of the group's mesh, in the same order.
    """

    @property
    def info(self) -> ParamInfo:
        """Name and shape, as they are now."""
        ...

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded parameter, as it is now."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the gradient that lands: ``info.part_shape``."""
        ...

    @property
    def owner(self) -> int:
        """Position of the owner in the group's mesh, counted row by row."""
        ...

    @property
    def is_owner(self) -> bool:
        """Whether this rank is the owner."""
        ...

    def has_landed(self) -> bool:
        """Whether ``.grad`` is what landed; else it is rows, which somebody has put there.

        Raises:
            LifecycleError: without any gradient.
        """
        ...

    def gradient(self) -> Tensor | None:
        """What landed, whole, on the owner: the memory of ``.grad``. ``None`` on other ranks."""
        ...

    @property
    def writes(self) -> int:
        """Counts what has written to the gradient since it landed."""
        ...

    def scatter(self, whole: Tensor | None, dtype: torch.dtype, *, key: int = 0) -> Rows:
        """Begin to send rows of ``whole``, which the owner alone has, to all ranks.

        ``key`` tells what is under way at once for one parameter apart.
        """
        ...

    def gather(self, rows: Tensor) -> Tensor | None:
        """The whole of what every rank has some ``rows`` of: on the owner, ``None`` elsewhere."""
        ...


class GradientLanding(Named, ABC):
    """Decides which gradients land whole on an owner, and on which. Exclusive per group.

    ``.grad`` of such a parameter is a ``DTensor`` all of whose rows lie with the owner. Norms and
    scaling take it as any other; what needs rows in their places refuses it.
    """

    @abstractmethod
    def owners(self, group: GroupInfo) -> Sequence[int | None]:
        """For each parameter its owner, or ``None`` where its gradient lands on shards.

        An owner is a position in ``group.mesh``, counted row by row. Asked once for each group.
        """

    lands: bool = True
    """Whether gradients land with their owners.

    Where not, they land on shards as all others do, so that other plugins may own how they are
    summed: :meth:`hold` is called all the same, :meth:`landed` never, and who needs a whole
    gradient gathers its rows.
    """

    takes_parts: bool = False
    """Whether it puts parts of a matrix together that other axes of a ``DTensor`` 's mesh divide.

    What lands on an owner is whole on ``group.mesh`` alone then: a part, of ``info.part_shape``.
    """

    def show(self, group: GroupInfo, parameters: Sequence[nn.Parameter]) -> None:
        """See all sharded parameters of the group, in order; each time before :meth:`hold`."""

    def hold(self, group: GroupInfo, parameters: Sequence[OwnedParameter]) -> None:
        """See the parameters that have an owner.

        Called when what moves them is made, and made anew: the last ones given for a parameter are
        those to use.
        """

    def landed(self, parameter: OwnedParameter) -> None:
        """The gradient of ``parameter`` is in place, on all ranks of the mesh.

        Called within the backward, after the last one of an iteration alone. Must not communicate.
        """
