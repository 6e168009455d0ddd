"""The seam for failure handling; core alone leaves failures to torch's time-outs.

[Note: failures]
A rank that fails in a step leaves its peers waiting in a transfer, which ends with the time-out of
the process group. polyshard-resilience does better. It is told of the parts of a step here, hears
of their exceptions, brings connections of its own for gloo, and may raise an error that says which
rank failed and why. A handler is of the default process group: groups ask for it when they are
planned, and keep it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from types import FrameType, TracebackType

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from polyshard.errors import LifecycleError


class Kind(Enum):
    """What a part of a step does."""

    TRANSFER = auto()
    """Operations of the engine or a plugin for one group."""
    FORWARD = auto()
    """The model's outermost forward."""
    BACKWARD = auto()
    """The model's backward."""
    CALL = auto()
    """A call of a sharded module, with what is done to its results."""


@dataclass(frozen=True)
class Ended:
    """Parameters of a unit at the end of the last backward.

    Attributes:
        mesh: whose ranks share them.
        lacking: names of those without a gradient, of each reduction of the iteration.
    """

    mesh: DeviceMesh
    lacking: tuple[str, ...]


class Part:
    """A part of a step. As a context manager it surrounds a block with the handler's methods."""

    def __init__(self, name: object, place: object = None, kind: Kind = Kind.TRANSFER) -> None:
        """``name`` and ``place`` are asked for their text when there is something to say.

        Args:
            name: of the group or unit.
            place: where this rank is, for ranks that ask; ``name`` if not given.
            kind: what it does.
        """
        self._name = name
        self.place = name if place is None else place
        self.kind = kind
        self.handler = kept_failure_handler()
        self.is_watched = type(self.handler) is not FailureHandler
        """Whether the handler does anything when the part begins: core's does not."""

    @override
    def __str__(self) -> str:
        """The name of the group or unit."""
        return str(self._name)

    def __enter__(self) -> None:
        """As :meth:`FailureHandler.begin`."""
        self.handler.begin(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """As :meth:`FailureHandler.explain`."""
        if isinstance(error, Exception):
            self.handler.explain(self, error)


class FailureHandler:
    """What a rank does about failures. This one does nothing: torch's time-outs end what waits."""

    name = "torch's time-outs"
    """What ranks compare."""

    def begin_step(self) -> int:
        """The outermost forward begins.

        Returns:
            How often ranks have begun anew after failures: the same number on all of them.

        Raises:
            PeerError: when the step before was lost on another rank, and this one does not know.
        """
        return 0

    def begin(self, part: Part) -> None:
        """A part begins.

        Raises:
            PeerError: when the step is lost, quoting the rank that failed first.
        """

    def explain(
        self, part: Part, error: BaseException | None, caller: FrameType | None = None
    ) -> None:
        """A part failed: tell other ranks, unless one of theirs explains it.

        Args:
            part: that failed.
            error: that is raised; ``None`` in a backward whose exception is on its way in C++.
            caller: the frame that called the backward, where the exception will get to.

        Raises:
            PolyshardError: instead of ``error``, quoting the rank that failed first.
        """

    def end_step(self, ended: Iterator[Ended], forwards: Iterable[str]) -> None:
        """The last backward has ended: its reductions are done, or launched on a device.

        An optimizer steps next. A backward that reduces nothing (``no_sync``) is not told of: a
        rank may leave it out.

        Args:
            ended: every unit.
            forwards: the units with forwards since the last such backward, in order, by name;
                without those that ranks may skip (``set_reduce_scatter_unused_params``).

        Raises:
            PeerError: when they do not complete, quoting the rank that failed first.
        """

    @contextmanager
    def reset(self, error: BaseException | None, *, is_in_mid_step: bool) -> Iterator[None]:
        """A step is given up, in the block, because of ``error`` if one is handled."""
        yield

    def renew(self) -> None:
        """Make process groups work again that were broken; all ranks call it after a reset.

        Raises:
            PeerError: when they cannot be made to.
        """

    @contextmanager
    def waiting(
        self, ranks: Sequence[int], key: str, count: int, what: str
    ) -> Iterator[Callable[[], str | None]]:
        """A block that waits at the store until ``ranks`` have come to ``key`` for a time.

        Args:
            ranks: global ones, with this one.
            key: the same on all of them.
            count: how often they have met there, with this time.
            what: they are about to do.

        Yields:
            What says why they will not all come, once that is known.
        """
        yield lambda: None

    def wire(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> object:
        """A gloo ``Wire`` that ends when one of ``ranks`` fails; ``None`` for ``group``'s own."""
        del group, ranks
        return None


class _Registry:
    """Which handler there is; one for the process, as are threads and hooks of the interpreter."""

    def __init__(self) -> None:
        handler = FailureHandler()
        self.current: Callable[[], FailureHandler] = lambda: handler
        self.is_kept = False


@functools.cache
def _registry() -> _Registry:
    return _Registry()


def failure_handler() -> FailureHandler:
    """The handler of the default process group, for one call."""
    return _registry().current()


def kept_failure_handler() -> FailureHandler:
    """The same for a caller that keeps it: :func:`handle_failures` sets no other from now on."""
    _registry().is_kept = True
    return failure_handler()


def handle_failures(current: Callable[[], FailureHandler]) -> None:
    """Have ``current`` return the handler of the default process group from now on.

    Raises:
        LifecycleError: after something was sharded among ranks, whose groups keep the handler.
    """
    registry = _registry()
    if registry.current is current:
        return
    if registry.is_kept and dist.is_initialized() and dist.get_world_size() > 1:
        raise LifecycleError(
            "a model was sharded before the failure handler was set, and its groups would not use "
            "it. Call polyshard_resilience.enable() on every rank before fully_shard."
        )
    registry.current = current
