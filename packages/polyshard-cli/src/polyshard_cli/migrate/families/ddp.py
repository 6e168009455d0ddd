"""DDP: the wrapper becomes one sharded unit."""

from __future__ import annotations

import libcst as cst

from polyshard_cli.migrate.editing.draft import Draft
from polyshard_cli.migrate.editing.finding import Kind
from polyshard_cli.migrate.families.units import shard_call
from polyshard_cli.migrate.families.wrapper import (
    Wrapping,
    bind,
    check_optimizer,
    is_word,
    report_uses,
)
from polyshard_cli.migrate.source.view import Use
from polyshard_cli.migrate.terms import ddp
from polyshard_cli.migrate.terms.term import Term, Verdict

__all__ = ["migrate_ddp"]

_WRAPPER = ddp.NAMES.terms[0]


def migrate_ddp(draft: Draft) -> bool:
    """Edit the calls that are certain; whether something is sharded afterwards."""
    done = False
    for use in draft.view.uses:
        call = draft.view.parent(use.node)
        if use.known is None or use.known.family != "ddp":
            continue
        if isinstance(call, cst.Call) and call.func is use.node:
            done |= _migrate(draft, use, call)
    return done


def _migrate(draft: Draft, use: Use, call: cst.Call) -> bool:
    wrapping = Wrapping(draft.view, use, call, needed={"fully_shard", "SameValues"})
    wrapping.added["plugins"] = "[SameValues()]"
    if not use.is_certain:
        wrapping.leave(call, _WRAPPER, "its name is bound to something else as well.")
    elif not draft.can_want(use, *wrapping.needed):
        why = "one of fully_shard, SameValues is bound to something else here."
        wrapping.leave(call, _WRAPPER, why)
    else:
        _translate(wrapping)
        check_optimizer(wrapping, _WRAPPER)
    if wrapping.left:
        draft.findings += wrapping.left
        return False
    draft.edits[call] = shard_call(wrapping)
    draft.consumed |= {*wrapping.consumed, use.node}
    draft.want(use, *wrapping.needed)
    draft.findings += wrapping.findings
    draft.say(call, Kind.CHANGED, _WRAPPER.theirs, "it is `fully_shard`.")
    draft.differs(call, _WRAPPER)
    report_uses(draft, wrapping, ddp.METHODS, _nothing)
    return True


def _nothing(access: cst.Attribute, call: cst.Call, term: Term) -> bool:
    """No method of DDP is rewritten."""
    del access, call, term
    return False


def _translate(wrapping: Wrapping) -> None:
    given = bind(wrapping.call, [term.theirs for term in ddp.KEYWORDS.terms])
    if given is None or "module" not in given:
        wrapping.leave(wrapping.call, _WRAPPER, "its arguments are not all written out.")
        return
    for name, arg in given.items():
        term = ddp.KEYWORDS.find(name)
        assert term is not None
        if name == "module":
            wrapping.kept[arg] = ("", None)
        elif is_word(arg.value, "None"):
            wrapping.consumed.add(arg)
        elif term.verdict is Verdict.DROPPED:
            wrapping.drop(arg, term)
        elif name == "device_mesh":
            wrapping.kept[arg] = ("mesh", None)
        else:
            wrapping.leave(arg, term, f"`{name}=` is not the same thing there.")
