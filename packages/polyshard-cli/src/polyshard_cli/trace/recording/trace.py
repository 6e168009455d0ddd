"""The plugin: hears what the engine tells observers, and writes it to this rank's file."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from typing_extensions import override

from polyshard import Plugin, hookimpl
from polyshard.plugins.seams import GroupIdentity, GroupInfo, Observer
from polyshard_cli.__about__ import __version__
from polyshard_cli.trace.errors import TraceError
from polyshard_cli.trace.events import Kind
from polyshard_cli.trace.recording.facts import Facts
from polyshard_cli.trace.recording.session import Session, watching
from polyshard_cli.trace.recording.sink import Sink
from polyshard_cli.trace.recording.spans import Spans

__all__ = ["Trace"]


class Trace(Plugin, Observer):
    """Writes what one model does to ``FOLDER/rankN.json``, for Perfetto and ``polyshard trace``.

    Pass one object to all ``fully_shard`` calls of a model, and train inside of
    :meth:`recording`. Without that transfers and compute are written nevertheless, but nothing of
    the optimizer, no codecs and axes, and no clocks of other ranks.

    Folder and steps may differ between ranks: nothing of a trace is compared, and results are the
    same bits with it. Times are the host's.
    """

    name: ClassVar[str] = "trace"
    version: ClassVar[str] = __version__

    def __init__(
        self,
        folder: str | PathLike[str] = "traces",
        *,
        steps: range | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """Nothing is written before the first step that is chosen.

        Args:
            folder: where; it is made if need be. A trace that is there already is replaced.
            steps: which to write, counted from 0 by ends of backwards; all by default. What comes
                after a step's backward (the optimizer, say) is part of it until the next forward.
            clock: nanoseconds, never going back.

        Raises:
            TraceError: for steps that are no range of numbers from 0 on.
        """
        _check_steps(steps)
        self._clock = clock
        self._steps = steps
        self._sink = Sink(Path(folder), clock)
        self._spans = Spans(clock, self._sink.take)
        self._facts = Facts()
        self._watched: weakref.WeakSet[GroupIdentity] = weakref.WeakSet()
        self._step, self._is_over = -1, True
        self._is_on = False
        self._started: dict[tuple[Kind, str], int] = {}

    @property
    def path(self) -> Path:
        """This rank's file."""
        return self._sink.path

    @hookimpl
    def polyshard_observer(self, group: GroupInfo) -> Observer:
        """One for all groups."""
        self._watched.add(group.identity)
        return self

    # What a user calls ------------------------------------------------------------------------

    @contextmanager
    def recording(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> Iterator[None]:
        """Train inside of this. All ranks enter it, and leave it, alike: they compare clocks.

        The file is complete afterwards. After an exception it is as well, up to where that came,
        and clocks are not compared again.

        Args:
            model: the sharded root.
            optimizers: whose steps are to be seen.

        Raises:
            TraceError: on every rank, where one cannot write its file; for a model that was sharded
                without this object, and the second time.
        """
        session = Session(self._sink, self._clock)
        self._facts = session.open(model, self._watched)
        hooks = [h for one in optimizers for h in watching(one, self._begin, self._spans.end)]
        try:
            yield
        except BaseException:
            with suppress(TraceError):  # of the two the other one matters
                self._stop()
            session.abandon()
            raise
        finally:
            for hook in hooks:
                hook.remove()
        self._spans.end(Kind.STEP, f"step {self._step}")
        self._stop()
        session.close()

    def _stop(self) -> None:
        self._spans.end_all()
        self._is_on, self._is_over = False, True

    # What the engine tells --------------------------------------------------------------------

    @override
    def on_start(self, group: str, what: str) -> None:
        # What follows is told when peers may have done their part: too late for a begin.
        kind = Kind(what)
        if kind is Kind.GATHER:
            self._begin_step()
        if self._is_on:
            self._started[kind, group] = self._clock()

    @override
    def on_unshard(self, group: str, payload_bytes: int) -> None:
        self._move(Kind.GATHER, group, payload_bytes)

    @override
    def on_unsharded(self, group: str, wait_seconds: float) -> None:
        self._arrive(Kind.GATHER, group, wait_seconds)

    @override
    def on_reduce(self, group: str, payload_bytes: int) -> None:
        self._move(Kind.REDUCE, group, payload_bytes)

    @override
    def on_reduced(self, group: str, wait_seconds: float) -> None:
        self._arrive(Kind.REDUCE, group, wait_seconds)

    @override
    def on_replicas_summed(self, group: str, payload_bytes: int, seconds: float) -> None:
        self._past(Kind.REPLICAS, group, seconds, bytes=payload_bytes)

    @override
    def on_staged(self, group: str, direction: str, num_bytes: int, seconds: float) -> None:
        self._past(Kind.STAGING, group, seconds, bytes=num_bytes, direction=direction)

    @override
    def on_forward(self, unit: str) -> None:
        self._begin_step()
        self._begin(Kind.FORWARD, unit)

    @override
    def on_forward_end(self, unit: str) -> None:
        self._spans.end(Kind.FORWARD, unit)

    @override
    def on_backward(self, unit: str) -> None:
        self._begin(Kind.BACKWARD, unit)

    @override
    def on_backward_end(self, unit: str) -> None:
        self._spans.end(Kind.BACKWARD, unit)

    @override
    def on_broken(self) -> None:
        with suppress(TraceError):  # what broke the step off is on its way to the user
            self._spans.end_all()
            self._sink.flush()
        self._is_over = True

    @override
    def on_step_end(self) -> None:
        self._is_over = True
        self._sink.flush()

    # ------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """The first thing that a step does; nothing to do later on."""
        if not self._is_over:
            return
        self._is_over = False
        self._spans.end(Kind.STEP, f"step {self._step}")
        self._step += 1
        self._is_on = self._steps is None or self._step in self._steps
        if self._is_on:
            self._sink.open()
            self._spans.begin(Kind.STEP, f"step {self._step}", {"step": self._step})

    def _begin(self, kind: Kind, name: str) -> None:
        if self._is_on:
            self._spans.begin(kind, name, {})

    def _move(self, kind: Kind, group: str, payload_bytes: int) -> None:
        if not self._is_on:
            return
        while self._spans.is_open(kind, group):  # one whose end was not told
            self._spans.end(kind, group)
        args = self._facts.args(kind, group, bytes=payload_bytes)
        self._spans.begin(kind, group, args, self._started.pop((kind, group), None))

    def _arrive(self, kind: Kind, group: str, wait_seconds: float) -> None:
        if self._spans.is_open(kind, group):
            self._spans.end(kind, group, wait_us=round(1e6 * wait_seconds, 3))
            self._spans.past(Kind.WAIT, group, wait_seconds, {"for": kind})

    def _past(self, kind: Kind, group: str, seconds: float, **args: object) -> None:
        if self._is_on:
            self._spans.past(kind, group, seconds, self._facts.args(kind, group, **args))


def _check_steps(steps: object) -> None:
    is_right = isinstance(steps, range) and (not steps or min(steps[0], steps[-1]) >= 0)
    if steps is not None and not is_right:
        raise TraceError(f"Trace(steps={steps!r}): give a range from 0 on, such as range(5, 8)")
