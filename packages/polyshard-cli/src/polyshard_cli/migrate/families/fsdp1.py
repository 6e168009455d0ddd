"""FSDP1: every call that wraps becomes ``fully_shard``, or none of the file does."""

from __future__ import annotations

import libcst as cst

from polyshard_cli.migrate.editing.draft import Draft
from polyshard_cli.migrate.editing.finding import Kind
from polyshard_cli.migrate.families.fsdp1_keywords import translate
from polyshard_cli.migrate.families.units import place, shard_call
from polyshard_cli.migrate.families.wrapper import Wrapping, check_optimizer, report_uses
from polyshard_cli.migrate.source.view import Use, dotted
from polyshard_cli.migrate.terms import fsdp1
from polyshard_cli.migrate.terms.term import Term

__all__ = ["migrate_fsdp1"]

_WRAPPER = fsdp1.NAMES.terms[0]
_TYPE_PARTS = (
    cst.Name,
    cst.Attribute,
    cst.Tuple,
    cst.Element,
    cst.Arg,
    cst.BinaryOperation,
    cst.Subscript,
    cst.SubscriptElement,
    cst.Index,
)
"""Of what types in annotations and ``isinstance`` are made."""


def migrate_fsdp1(draft: Draft) -> bool:
    """Edit what is certain; whether something is sharded afterwards."""
    uses = [
        use
        for use in draft.view.uses
        if use.known is not None and use.known.name == _WRAPPER.theirs
    ]
    wrappings = [_wrapping(draft, use) for use in uses]
    calls = [each for each in wrappings if each is not None]
    if not calls:
        _list_others(draft, uses, wraps=False)
        return False
    left = [finding for each in calls for finding in each.left]
    if left:
        draft.findings += [finding for finding in left if finding not in draft.findings]
        for each in calls:
            if not each.left:
                why = f"stays as it is, since line {left[0].line} needs a hand."
                draft.leave(each.call, _WRAPPER, why)
        return False
    for each in calls:
        _commit(draft, each)
    _list_others(draft, uses, wraps=True)
    return True


def _wrapping(draft: Draft, use: Use) -> Wrapping | None:
    call = draft.view.parent(use.node)
    if not isinstance(call, cst.Call) or call.func is not use.node:
        return None
    wrapping = Wrapping(draft.view, use, call)
    if not use.is_certain:
        why = f"`{draft.view.code(use.node)}` is bound to something else as well."
        wrapping.leave(call, _WRAPPER, why)
        return wrapping
    translate(wrapping)
    check_optimizer(wrapping, _WRAPPER)
    if not wrapping.left:
        place(wrapping)
    if not wrapping.left and not draft.can_want(use, *wrapping.needed):
        names = ", ".join(sorted(wrapping.needed))
        why = f"one of {names} is bound to something else here."
        wrapping.leave(call, _WRAPPER, why)
    return wrapping


def _commit(draft: Draft, wrapping: Wrapping) -> None:
    statement = draft.view.statement(wrapping.call)
    if wrapping.classes or wrapping.takes:
        assert statement is not None
        draft.before.setdefault(statement, []).extend(place(wrapping))
    draft.edits |= wrapping.edits
    draft.edits[wrapping.call] = shard_call(wrapping)
    draft.consumed |= {*wrapping.consumed, wrapping.use.node}
    draft.want(wrapping.use, *wrapping.needed)
    draft.findings += [each for each in wrapping.findings if each not in draft.findings]
    draft.say(wrapping.call, Kind.CHANGED, _WRAPPER.theirs, "it is `fully_shard`.")
    draft.differs(wrapping.call, _WRAPPER)

    def clip(access: cst.Attribute, call: cst.Call, term: Term) -> bool:
        return _clip(draft, wrapping.use, access, call)

    report_uses(draft, wrapping, fsdp1.METHODS, clip)


def _clip(draft: Draft, use: Use, access: cst.Attribute, call: cst.Call) -> bool:
    """``model.clip_grad_norm_(1.0)`` becomes ``clip_grad_norm_(model.parameters(), 1.0)``."""
    if access.attr.value != "clip_grad_norm_" or not draft.can_want(use, "clip_grad_norm_"):
        return False
    wrapper = dotted(use.node).partition(".")[0]
    if not draft.view.is_same(wrapper, call, use.node):
        return False  # what is imported within another function is not there
    first = cst.Arg(cst.parse_expression(f"{draft.view.code(access.value)}.parameters()"))

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.Call)
        return node.with_changes(func=cst.Name("clip_grad_norm_"), args=[first, *node.args])

    draft.edits[call] = edit
    draft.want(use, "clip_grad_norm_")
    draft.say(call, Kind.CHANGED, "clip_grad_norm_", "`polyshard.clip_grad_norm_`.")
    return True


def _list_others(draft: Draft, uses: list[Use], *, wraps: bool) -> None:
    """``isinstance`` and annotations name FSDPModule; methods of the class are listed.

    A file that wraps nothing may be meant for modules that others wrap with FSDP1: it stays.
    """
    for use in uses:
        if use.node in draft.consumed:
            continue
        parent = draft.view.parent(use.node)
        if isinstance(parent, cst.Attribute):
            term = fsdp1.METHODS.find(parent.attr.value) or _WRAPPER
            draft.leave(parent, term, f"`{draft.view.code(parent)}` is FSDP1's.")
        elif not wraps or not use.is_certain or not _asks_for_type(draft, use):
            continue  # listed with all that is left
        elif draft.can_want(use, "FSDPModule"):
            draft.want(use, "FSDPModule")
            draft.consumed.add(use.node)
            draft.edits[use.node] = lambda _: cst.Name("FSDPModule")
            draft.say(use.node, Kind.CHANGED, _WRAPPER.theirs, "the class is `FSDPModule`.")


def _asks_for_type(draft: Draft, use: Use) -> bool:
    """Whether ``use`` is the second argument of ``isinstance``, or annotates."""
    node: cst.CSTNode = use.node
    for parent in draft.view.ancestors(use.node):
        if isinstance(parent, cst.Annotation):
            return True
        if isinstance(parent, cst.Call):
            is_check = draft.view.code(parent.func) == "isinstance" and len(parent.args) == 2
            return is_check and parent.args[1] is node
        if not isinstance(parent, _TYPE_PARTS):
            return False
        node = parent
    return False
