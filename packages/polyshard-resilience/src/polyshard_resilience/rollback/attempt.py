"""``with attempt(model, optimizer):`` and ``attempts(..., sizes=...)``.

[Note: attempts]
Weights change in an optimizer's step and nowhere else. So ranks come to a ballot right before the
first of them steps (see [Note: ballots]): what fails until then, in forward, backward or between,
needs no weights to be put back on any rank. Only a failure inside of the steps does, and for that
each optimizer's parameters and state are copied before it steps, unless the caller does without.

What is put back comes from this rank alone. A rank whose peers are gone can go back as well.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from polyshard._torch.private import in_backward, untraced
from polyshard.agreement.meeting import report_failure
from polyshard.engine.plans import audiences
from polyshard.engine.root import groups_of
from polyshard.errors import LifecycleError, PeerError, SettingError
from polyshard.plugins.seams import Stateful
from polyshard_resilience.alarm.peers import tell
from polyshard_resilience.alarm.reports import NOBODY
from polyshard_resilience.errors import AttemptError
from polyshard_resilience.handler import check_enabled, refusal_of
from polyshard_resilience.rollback.optimizers import Undoable
from polyshard_resilience.rollback.undo import Scope, Undo
from polyshard_resilience.rollback.verdict import (
    DISAGREED,
    DONE,
    READY,
    Ballot,
    Kind,
    Verdict,
    go_back,
)

T = TypeVar("T")

_UNDER_WAY: ContextVar[frozenset[int]] = ContextVar("_UNDER_WAY", default=frozenset())
"""Groups of models that a thread attempts a step of, by identity."""


def attempt(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    also: Sequence[Stateful] = (),
    undo_steps: bool = True,
) -> Attempt[None]:
    """A block that succeeds on all ranks, or is undone on all of them.

    Put one whole step into it: forwards, backwards, ``optimizer.step()``. When any rank raises
    there, every rank is put back to where it was before, and raises an
    :class:`~polyshard_resilience.errors.AttemptError` that quotes it. Parameters, optimizers,
    gradients, buffers, random number generators and the state of plugins are put back, and
    ``also``.

    Args:
        model: of which something is sharded; the same call on every rank of its mesh.
        optimizers: all that step in the block.
        also: what else changes in it: a scheduler, a gradient scaler, the position in the data.
        undo_steps: whether a failure inside ``optimizer.step()`` can be undone. Copies of the
            optimizers' parameters and state are made before each step, on the host, for that.
            Without, such a failure is final, and says so; every other one is still undone.

    Raises:
        SettingError: when nothing of ``model`` is sharded, or something cannot take part.
    """
    return Attempt(Scope.of("attempt", model, optimizers, also), None, 0, undo_steps=undo_steps)


def attempts(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    sizes: Sequence[T],
    *,
    also: Sequence[Stateful] = (),
    undo_steps: bool = True,
) -> Iterator[Attempt[T]]:
    """Try one step with each of ``sizes`` until the memory of every rank suffices.

    Example::

        for trial in polyshard_resilience.attempts(model, optimizer, sizes=(8, 4, 2)):
            with trial as size:
                for part in batch.split(size):
                    loss_of(model(part)).backward()
                optimizer.step()
                optimizer.zero_grad()

    When any rank runs out of memory, of a device or of the host, all ranks return to the state
    before the block and try the next size. Any other failure raises as :func:`attempt` does, and so
    does the last size. Code after the block in the body of the loop runs after each trial: see
    :attr:`Attempt.succeeded`.

    Args:
        model: as in :func:`attempt`.
        optimizers: as in :func:`attempt`.
        sizes: values to try, largest first; the same number on every rank. Their meaning is yours.
        also: as in :func:`attempt`.
        undo_steps: as in :func:`attempt`.

    Raises:
        SettingError: as :func:`attempt`, or without sizes.
        LifecycleError: if a trial was not entered.
    """
    if not sizes:
        raise SettingError("attempts(sizes=()): there is nothing to try.")
    scope = Scope.of("attempts", model, optimizers, also)
    return _trials(scope, tuple(sizes), undo_steps=undo_steps)


def _trials(scope: Scope, sizes: tuple[T, ...], *, undo_steps: bool) -> Iterator[Attempt[T]]:
    for index, size in enumerate(sizes):
        left = len(sizes) - 1 - index
        trial = Attempt(scope, size, left, undo_steps=undo_steps)
        yield trial
        if trial.succeeded is None:
            raise LifecycleError("a trial of attempts() was not entered: use it in a with block.")
        if trial.succeeded:
            return
        _free_memory()  # only now: the exception held what the failed trial had allocated


def _free_memory() -> None:
    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


class Attempt(Generic[T]):
    """One block of :func:`attempt` or :func:`attempts`. See [Note: attempts]."""

    def __init__(self, scope: Scope, size: T, left: int, *, undo_steps: bool) -> None:
        """Nothing is kept before the block is entered."""
        self.size = size
        """What to try."""
        self.succeeded: bool | None = None
        """Whether all ranks succeeded; ``None`` until the block has ended."""
        self._scope, self._left, self._undo_steps = scope, left, undo_steps
        self._handles: list[RemovableHandle] = []
        self._groups: frozenset[int] = frozenset()
        self._ballot: Ballot
        self._undo: Undo
        self._is_ready = self._is_done = False
        self._verdict = Verdict()
        self._refused: AttemptError | None = None

    def __enter__(self) -> T:
        """Keep what a failure would have to put back.

        Raises:
            LifecycleError: inside of another attempt of the same model, or the second time; when
                :func:`~polyshard_resilience.enable` was not called.
            SettingError: when an optimizer steps in backward, and steps are not to be undone.
        """
        scope = self._scope
        groups = frozenset(map(id, groups_of(scope.model)))
        if self.succeeded is not None or self._groups or groups & _UNDER_WAY.get():
            raise LifecycleError(
                "an attempt of this model is under way, or was entered before. Put one step into "
                "one block, and make a new attempt for the next."
            )
        check_enabled(scope.ranks, "an attempt")
        self._groups = groups
        self._ballot = Ballot(scope.ranks, self._left)
        try:
            self._undo = Undo(scope)
            for optimizer in scope.optimizers:
                if isinstance(optimizer, Undoable) and optimizer.polyshard_steps_early:
                    self._keep(optimizer)
        except BaseException as error:
            self._tell(error)
            self._ballot.leave(READY, error)
            raise
        _UNDER_WAY.set(_UNDER_WAY.get() | groups)
        before = untraced(self._before_step)
        self._handles = [o.register_step_pre_hook(before) for o in scope.optimizers]
        return self.size

    def ready(self) -> None:
        """Continue only if every rank has come here.

        The first ``optimizer.step()`` does so by itself. Call it, on every rank, before collectives
        of your own that come earlier: clipping, sums of losses. A rank that waits in one for a rank
        that failed has to have its process group broken.

        Raises:
            AttemptError: on every rank, when one failed.
        """
        if not self._is_ready:
            self._is_ready = True
            self._verdict = self._ballot.cast(READY, None)
            if not self._verdict:
                self._refused = self._error()
                raise self._refused

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Step only if every rank is about to.

        Raises:
            AttemptError: on every rank, when one failed before.
        """
        del args, kwargs
        # Ranks step in a backward one after the other, and need each other to get there.
        if not in_backward():
            self.ready()
            if not self._undo_steps:
                return
        self._keep(optimizer)

    def _keep(self, optimizer: Optimizer) -> None:
        if not self._undo_steps:
            raise SettingError(
                f"{type(optimizer).__name__} steps in backward, so that without undo_steps=True no "
                "failure of a backward could be undone."
            )
        self._undo.keep(optimizer)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Learn how it went for all, and go back unless it went well.

        Raises:
            AttemptError: on every rank, when it failed on any.
        """
        del kind, trace
        for handle in self._handles:
            handle.remove()
        _UNDER_WAY.set(_UNDER_WAY.get() - self._groups)
        if error is not None and not isinstance(error, Exception):
            return self._interrupted(error)
        if self._refused is None:
            self._judge(error)
        self.succeeded = bool(self._verdict)
        undo = self._undo
        del self._undo  # this object may be kept for long, and keeps no gradients alive then
        if self.succeeded:
            return False
        refused = self._refused or self._error()
        verdict = go_back(self._ballot, self._verdict, undo.put_back)
        if verdict is not self._verdict:
            self._verdict = verdict
            refused = self._error()
        if refused.is_out_of_memory and refused.is_undone and self._verdict.left > 0:
            return True
        if refused is error:
            return False
        raise refused from error

    def _judge(self, error: Exception | None) -> None:
        """Learn how it went for all, with what was raised here."""
        if error is not None:
            self._tell(error)
            if isinstance(error, RuntimeError):
                error = refusal_of(error) or error
        was_ready = self._is_ready
        if not was_ready:
            self._verdict = self._ballot.cast(READY, error)
        if self._verdict and (error is None or was_ready):
            self._is_done = True
            self._verdict = self._ballot.cast(DONE, error)

    def _tell(self, error: BaseException) -> None:
        """Tell ranks that wait for this one, in a transfer or in the first forward."""
        tell(error)
        meshes = self._scope.meshes_to_meet
        if meshes and not isinstance(error, PeerError):
            report_failure(lambda: (ranks for mesh in meshes for ranks in audiences(mesh)), error)

    def _interrupted(self, error: BaseException) -> bool:
        """The process is being ended: others are told, and nothing waits for them."""
        self.succeeded = False
        # In this order: ranks that wait in a transfer learn of it before the process is gone, and
        # then they come to the ballot.
        if self._refused is None:
            self._ballot.leave(DONE if self._is_ready else READY, error)
        self._tell(error)
        self._undo.put_back()
        return False

    def _error(self) -> AttemptError:
        """What every rank raises."""
        verdict = self._verdict
        is_final = self._is_done and not self._undo_steps and bool(self._scope.optimizers)
        error = AttemptError(_message(verdict, is_final=is_final))
        error.ranks = tuple(rank for rank in verdict.said if rank != NOBODY)
        error.is_out_of_memory = verdict.kind is Kind.OUT_OF_MEMORY
        error.is_gone = verdict.kind is Kind.GONE
        error.is_undone = not is_final
        return error


def _message(verdict: Verdict, *, is_final: bool) -> str:
    each = (f"rank {rank}: {text}" for rank, text in verdict.said.items())
    failed = verdict.said.get(NOBODY)
    failed = f"a step failed on {'; '.join(each)}" if failed is None else f"a step failed: {failed}"
    if is_final:
        return (
            f"{failed}. Optimizers had begun to step, and undo_steps=False keeps "
            "no earlier state: weights of different ranks may belong to different steps. Load the "
            "last checkpoint."
        )
    text = f"{failed}. Every rank has the state from before the attempt"
    if verdict.kind is Kind.GONE:
        return (
            f"{text}, and no further step is possible. Save the remaining state "
            "(Checkpoints.save_survivors) and restart the job."
        )
    if verdict.kind is Kind.OUT_OF_MEMORY:
        text += ": use a smaller micro-batch, as polyshard_resilience.attempts(sizes=...) does"
        if verdict.left == DISAGREED:
            return f"{text}. Ranks were given different numbers of sizes; give all the same."
        return f"{text}."
    return f"{text}: catch AttemptError on every rank to continue, with another batch say."
