"""``finalize_backward()``: a backward ended by hand. See [Note: manual finalization]."""

from __future__ import annotations

from polyshard.engine.finalization import Reduction
from polyshard.engine.unit import RootContext, Unit
from polyshard.errors import LifecycleError
from polyshard.group.group import ParameterGroup

_CALL = "finalize_backward()"


def finalize(root: Unit) -> None:
    """Reduce what is pending, and end the iteration.

    Raises:
        LifecycleError: when there is nothing that could be ended so; nothing was changed then.
    """
    _check(root)
    _reduce_pending(root.context)
    root.context.end_iteration()


def start_to_finalize(root: Unit) -> Reduction:
    """As :func:`finalize`, leaving the last reductions on their way.

    Raises:
        LifecycleError: as there, and while other roots that share the communication are at work.
    """
    _check(root)
    finalization = root.context.finalization
    reduction = finalization.take_line()
    try:
        _reduce_pending(root.context)
    except BaseException:
        finalization.leave_line()  # there will be no handle; reset_iter_state() does the rest
        raise
    return reduction


def _reduce_pending(context: RootContext) -> None:
    finalization = context.finalization
    finalization.is_ending = True
    for unit in reversed(context.units):
        for group in reversed(unit.groups):
            if group in finalization.pending:
                context.post_backward(group)
            elif group.reshard_after_backward:
                group.reshard()


def _check(unit: Unit) -> None:
    context = unit.context
    finalization = context.finalization
    finalization.check_line(f"the next {_CALL}")
    if not unit.is_root:
        raise LifecycleError(
            f"{_CALL} was called on '{unit.name}', which is not the root. Call it on the outermost "
            "sharded module."
        )
    if not finalization.is_manual:
        raise LifecycleError(
            f"{_CALL} was called, but finalization is automatic: every backward ends the "
            "reductions. Call set_manual_backward_finalization(True) before the forward."
        )
    if context.turn.in_backward:
        raise LifecycleError(
            f"{_CALL} was called during a backward. Call it after the last backward has returned."
        )
    for group in context.groups():
        _check_replicas(group, context)


def _check_replicas(group: ParameterGroup, context: RootContext) -> None:
    if context.holds_partial(group):
        raise LifecycleError(
            f"{_CALL} was called while group '{group.name}' holds partial sums of replicas, which "
            "it does not support (nor does torch). Do not call set_requires_all_reduce(False), or "
            "call set_manual_backward_finalization(False)."
        )
    is_reduced = group in context.finalization.pending and group.reduces
    if is_reduced and group.roles.is_replicated and not group.all_reduces:
        raise LifecycleError(
            f"{_CALL} was called while group '{group.name}' does not sum over replicas. Call "
            "set_requires_all_reduce(True) before."
        )
