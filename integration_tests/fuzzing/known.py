"""Cases that fail for a reason that is known and not mended yet; empty is what it should be."""

from __future__ import annotations

from collections.abc import Callable

from fuzzing.case import ByHand, Case, Evaluate, Save, Step, Train, Write, leaves, units


def saves(case: Case, *ways: str) -> bool:
    """Whether it saves in one of these ways."""
    return any(isinstance(a, Save) and a.how in ways for a in case.script)


def assigns_while_accumulating(case: Case) -> bool:
    """Whether it assigns parameters between ``no_sync`` and the reduction."""
    pending = False
    for action in case.script:
        if isinstance(action, Train):
            pending = not (action.sync and action.all_reduce)
        if pending and isinstance(action, Save) and action.how == "assign":
            return True
    return False


def partial_sums_of_some(case: Case) -> bool:
    """Whether replicas add up later what not every micro-batch has."""
    later = any(isinstance(a, Train) and not a.all_reduce for a in case.script)
    some = any(leaf.used == "even" for leaf in leaves(case.tree))
    return later and some and case.mesh.replicas > 0


def writes_below_checksums(case: Case) -> bool:
    """Whether parameters on disk, with checksums, are written by what bumps no version."""
    summed = case.offload is not None and case.offload.params == "disk" and case.offload.checksums
    return summed and any(isinstance(a, Write) for a in case.script)


def changes_while_gathered(case: Case) -> bool:
    """Whether parameters change while a unit may be kept unsharded."""
    keeps = any(unit.reshard is False for unit in units(case.tree))
    gathered = False
    for action in case.script:
        if gathered and isinstance(action, Step | Write | Save):
            return True
        if isinstance(action, Train):
            gathered = action.keep
        gathered |= isinstance(action, ByHand) and not action.reshard
        gathered |= isinstance(action, Evaluate) and keeps
    return False


KNOWN: tuple[tuple[str, Callable[[Case], bool]], ...] = (
    ("A2: torch.save and deepcopy of a state dict", lambda c: saves(c, "torch.save", "deepcopy")),
    ("A11: assign drops accumulated gradients", assigns_while_accumulating),
    ("A4: partial sums of parameters not always used", partial_sums_of_some),
    ("A5: checksums take writes of foreach for corruption", writes_below_checksums),
    ("A5: what is kept unsharded does not see the optimizer", changes_while_gathered),
)
"""Reason, and which cases it is about."""


def known(case: Case) -> str | None:
    """Why ``case`` is left out, if it is."""
    return next((reason for reason, concerns in KNOWN if concerns(case)), None)
