"""Who ends a backward: the backward itself, or a call of the user's.

[Note: manual finalization]
A backward ends its iteration by itself: what no post-backward reached is reduced, and sharded
gradients are in place when it returns. After ``set_manual_backward_finalization(True)`` it leaves
that to ``finalize_backward()``, which comes after any number of backwards (a pipeline's
micro-batches). Groups that have something to reduce then are *pending*: those that accumulated, and
those that no post-backward reached. Which of the two holds is settled when the first backward of an
iteration starts, and holds to the iteration's end.

Started asynchronously, the last reductions are on their way until the handle is waited for. Until
then no root on the same *line* (those of one ``share_comm_ctx``) starts anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet

from polyshard._torch.private import in_backward
from polyshard.errors import LifecycleError

if TYPE_CHECKING:
    from polyshard.group.group import ParameterGroup

_WAIT_FIRST = "Call wait() on the GradientReductionHandle that finalize_backward() returned before"


class Reduction:
    """Reductions that a handle waits for; told from others by identity."""


@dataclass(eq=False)
class Line:
    """What roots that share their communication have in common."""

    roots: WeakSet[Finalization] = field(default_factory=WeakSet)
    reduction: Reduction | None = None
    owner: Finalization | None = None
    """The root whose ``reduction`` is on its way."""


class Finalization:
    """Of one root. See [Note: manual finalization]."""

    def __init__(self) -> None:
        self.is_manual = False
        """Whether an iteration, the one under way or else the next, ends by a call."""
        self.is_last_backward = True
        """What the user says of backwards that end by themselves."""
        self.is_ending = False
        """Whether a call ends the iteration now."""
        self.is_busy = False
        """Whether forwards or backwards have begun that no end of an iteration followed yet."""
        self.pending: dict[ParameterGroup, None] = {}
        self.line = Line()
        self.line.roots.add(self)
        self._has_begun = False
        """Whether a backward of the iteration has started, so that the mode holds to its end."""

    def join(self, line: Line) -> None:
        """Share the communication of other roots."""
        self.line = line
        line.roots.add(self)

    # Modes ------------------------------------------------------------------------------------

    def choose(self, enabled: bool) -> None:
        """What the user wants from the next backward on.

        Raises:
            LifecycleError: when it is too late for that.
        """
        if enabled != self.is_manual and in_backward():
            raise LifecycleError(
                "set_manual_backward_finalization() cannot change the mode during a backward. Call "
                "it before."
            )
        if self._has_begun and enabled != self.is_manual:
            raise LifecycleError(
                "set_manual_backward_finalization() cannot change the mode after a backward of the "
                "iteration has started. End the iteration with finalize_backward() (or drop it "
                "with reset_iter_state()) first."
            )
        self.is_manual = enabled

    def begin_backward(self) -> None:
        """A backward starts; the first one of an iteration settles how that ends."""
        self._has_begun = True

    @property
    def is_last(self) -> bool:
        """Whether no backward of this iteration will follow."""
        return self.is_ending if self.is_manual else self.is_last_backward

    def end_iteration(self) -> None:
        """The iteration has ended, or was given up."""
        self._has_begun = False
        self.is_ending = self.is_busy = False

    # The line ---------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether a handle of this root is still to be waited for."""
        return self.line.owner is self

    def check_line(self, what: str) -> None:
        """Refuse to start ``what`` while the line is taken.

        Raises:
            LifecycleError: while a handle is to be waited for.
        """
        if self.line.owner is None:
            return
        whose = "this module" if self.waits else "another root of the same share_comm_ctx()"
        raise LifecycleError(f"gradients of {whose} are still being reduced. {_WAIT_FIRST} {what}.")

    def take_line(self) -> Reduction:
        """From now on a handle is to be waited for.

        Raises:
            LifecycleError: while other roots of the line are at work.
        """
        if any(root.is_busy for root in self.line.roots if root is not self):
            raise LifecycleError(
                "finalize_backward(async_op=True) was called while another root of the same "
                "share_comm_ctx() is between its forward and the end of its backward. End that "
                "first, call finalize_backward() without async_op, or do not share."
            )
        self.line.owner, self.line.reduction = self, Reduction()
        return self.line.reduction

    def check_valid(self, reduction: Reduction) -> None:
        """Refuse a handle whose reductions were dropped.

        Raises:
            LifecycleError: after ``reset_iter_state()``.
        """
        if self.line.reduction is not reduction:
            raise LifecycleError(
                "this GradientReductionHandle is no longer valid: reset_iter_state() dropped the "
                "reductions that it waits for, and their gradients."
            )

    def leave_line(self) -> None:
        """Nothing of this root is waited for any more."""
        if self.waits:
            self.line.owner = self.line.reduction = None

    def check_reset(self) -> None:
        """Refuse to reset what another root is waited for.

        Raises:
            LifecycleError: while a handle of another root of the line is to be waited for.
        """
        if self.line.owner is not None and not self.waits:
            raise LifecycleError(
                "reset_iter_state() cannot drop the reductions of another root of the same "
                f"share_comm_ctx(). {_WAIT_FIRST}, or reset that root."
            )

    def reset(self) -> None:
        """Forget the iteration; a handle still waited for is no longer valid."""
        self.pending.clear()
        self.leave_line()
        self.end_iteration()
