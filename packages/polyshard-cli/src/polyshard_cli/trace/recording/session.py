"""What surrounds the steps that are recorded: the file, clocks, hooks of optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from polyshard.errors import PolyshardError
from polyshard.planning import identities_of
from polyshard.plugins.seams import GroupIdentity
from polyshard_cli.trace.clocks.ranks import Line, Ranks
from polyshard_cli.trace.errors import TraceError
from polyshard_cli.trace.events import Kind
from polyshard_cli.trace.recording.facts import Facts
from polyshard_cli.trace.recording.sink import Sink

__all__ = ["Session", "watching"]


class Session:
    """One recording of one rank; all ranks open and close theirs together."""

    def __init__(self, sink: Sink, clock: Callable[[], int]) -> None:
        """Nothing is made before :meth:`open`."""
        self._sink = sink
        self._clock = clock
        self._line: Line | None = None

    def open(self, model: nn.Module, watched: Collection[GroupIdentity]) -> Facts:
        """Begin; what spans of this model say.

        Raises:
            TraceError: on every rank, where one has a problem.
        """
        ranks = Ranks.current()
        run = ranks.agree(self._problem(model, watched))
        self._line = ranks.connect()
        self._sink.note(run, self._line.offset(self._clock))
        return Facts.of(model)

    def _problem(self, model: nn.Module, watched: Collection[GroupIdentity]) -> TraceError | None:
        try:
            _check_watched(model, watched)
            if self._sink.is_over:
                raise TraceError(
                    f"the trace {self._sink.path} is over: recording() was left, or a write "
                    "failed. Make another Trace, with another folder."
                )
            self._sink.open()
        except TraceError as error:
            return error
        except PolyshardError as error:  # a model that is not sharded, say
            return TraceError(str(error))
        return None

    def close(self) -> None:
        """End it, with another look at the clocks."""
        assert self._line is not None
        try:
            self._sink.note("", self._line.offset(self._clock))
        except RuntimeError as error:
            warnings.warn(
                f"polyshard trace: ranks did not compare clocks at the end ({error}); the trace of "
                "this rank is whole, and drift of its clock is not corrected.",
                stacklevel=4,
            )
        self._line.close()
        self._sink.close()

    def abandon(self) -> None:
        """An exception is on its way, which matters more than what goes wrong here."""
        if self._line is not None:
            self._line.close()
        with suppress(TraceError):
            self._sink.close()


def _check_watched(model: nn.Module, watched: Collection[GroupIdentity]) -> None:
    own = identities_of(model)
    if not own.intersection(watched):
        raise TraceError(
            f"{type(model).__name__} was sharded without this Trace: pass it to fully_shard, "
            "plugins=[trace], and to recording() of the same object."
        )
    if not own.issuperset(watched):
        raise TraceError(
            f"this Trace watches groups of another model than {type(model).__name__} as well, and "
            "names of groups repeat: make one Trace, with a folder of its own, for each model, and "
            "give recording() the root."
        )


def watching(
    optimizer: torch.optim.Optimizer,
    begin: Callable[[Kind, str], None],
    end: Callable[[Kind, str], None],
) -> Iterator[Any]:
    """Hooks around the steps of ``optimizer``, to be removed."""
    name = type(optimizer).__name__
    yield optimizer.register_step_pre_hook(lambda *_: begin(Kind.OPTIMIZER, name))
    yield optimizer.register_step_post_hook(lambda *_: end(Kind.OPTIMIZER, name))
