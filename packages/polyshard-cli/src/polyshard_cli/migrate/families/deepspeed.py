"""DeepSpeed: ``initialize`` and its engine, where the whole of it is certain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from polyshard_cli.migrate.editing.draft import Draft
from polyshard_cli.migrate.editing.finding import Kind
from polyshard_cli.migrate.editing.text import call_text
from polyshard_cli.migrate.families.deepspeed_config import Wish, wish_of
from polyshard_cli.migrate.families.deepspeed_site import Site, find_site
from polyshard_cli.migrate.families.wrapper import bind, is_word, report_methods, report_module
from polyshard_cli.migrate.source.config import (
    Configuration,
    find_configuration,
    load_configuration,
)
from polyshard_cli.migrate.source.view import Use
from polyshard_cli.migrate.terms import deepspeed
from polyshard_cli.migrate.terms.term import Term

__all__ = ["Beside", "migrate_deepspeed"]

_INITIALIZE = deepspeed.NAMES.terms[0]
_INIT_DISTRIBUTED = deepspeed.NAMES.terms[1]


@dataclass(frozen=True)
class Beside:
    """What is beside a script: its folder, and the configuration that the user names."""

    folder: Path
    configuration: Path | None = None


def migrate_deepspeed(draft: Draft, beside: Beside) -> bool:
    """Edit the one call of ``initialize``; whether something is sharded afterwards."""
    found = [use for use in draft.view.uses if use.known and use.known.term is _INITIALIZE]
    calls = [
        (use, call)
        for use in found
        if isinstance(call := draft.view.parent(use.node), cst.Call) and call.func is use.node
    ]
    if len(calls) > 1:
        for _, call in calls:
            why = "is called more than once: which engine is which cannot be followed."
            draft.leave(call, _INITIALIZE, f"`{_INITIALIZE.theirs}` {why}")
        return False
    return bool(calls) and _migrate(draft, *calls[0], beside)


def _migrate(draft: Draft, use: Use, call: cst.Call, beside: Beside) -> bool:
    given = bind(call, [term.theirs for term in deepspeed.KEYWORDS.terms])
    if given is None:
        draft.leave(call, _INITIALIZE, "its arguments are not all written out.")
        return False
    configuration = _configuration(draft, given, beside)
    if configuration is None:
        why = (
            "its configuration is neither a dict written out in this file, which only reads it, "
            "nor a JSON file that it names."
        )
        instead = "name it: polyshard migrate --deepspeed-config FILE"
        draft.say(call, Kind.HAND, "config", why, instead)
        return False
    wish = wish_of(draft, call, configuration)
    site = find_site(draft, call, given)
    if isinstance(site, str):
        draft.leave(call, _INITIALIZE, site)
        return False
    if wish.is_left:
        why = "stays as it is, since its configuration needs a hand."
        draft.leave(call, _INITIALIZE, why)
        return False
    needed = _needed(wish)
    if not use.is_certain or not draft.can_want(use, *needed) or not _has_torch(draft, call, wish):
        why = f"one of {', '.join(sorted(needed))}, torch is bound to something else here."
        draft.leave(call, _INITIALIZE, why)
        return False
    _commit(draft, use, site, wish)
    draft.want(use, *needed)
    return True


def _configuration(draft: Draft, given: dict[str, cst.Arg], beside: Beside) -> Configuration | None:
    """What the call is given; the file that the user names is that of the command line."""
    arg = given.get("config") or given.get("config_params")
    own = find_configuration(draft.view, arg.value, beside.folder) if arg else None
    if own is None and beside.configuration is not None:
        return load_configuration(beside.configuration)
    return own


def _needed(wish: Wish) -> set[str]:
    needed = {"fully_shard", "SameValues"}
    if wish.precision:
        needed.add("MixedPrecisionPolicy")
    if wish.clipping:
        needed.add("clip_grad_norm_")
    return needed


def _has_torch(draft: Draft, node: cst.CSTNode, wish: Wish) -> bool:
    if not wish.precision:
        return True
    bound = draft.view.assignments(node, "torch")
    names = [name for each in bound for name in each.get_qualified_names_for("torch")]
    return bool(names) and all(n.name == "torch" and n.source.name == "IMPORT" for n in names)


def _commit(draft: Draft, use: Use, site: Site, wish: Wish) -> None:
    shard = cst.parse_statement(call_text("fully_shard", [site.model, *wish.arguments()]))
    draft.before.setdefault(site.optimizer_line, []).append(shard)
    lines = [
        cst.parse_statement(f"{name} = {value}").body[0]  # type: ignore[index]
        for name, value in ((site.engine, site.model), (site.returned, site.optimizer))
        if name not in {"_", value}
    ]
    draft.edits[site.line.body[0]] = lambda _: (
        cst.FlattenSentinel(lines) if lines else cst.RemoveFromParent()
    )
    draft.consumed |= {site.line}
    draft.say(site.line, Kind.CHANGED, _INITIALIZE.theirs, "`fully_shard`, before the optimizer.")
    draft.differs(site.line, _INITIALIZE)

    def rewrite(access: cst.Attribute, call: cst.Call, term: Term) -> bool:
        return _rewrite(draft, site, wish, access, call)

    report_methods(draft, site.engine_target, deepspeed.METHODS, rewrite)
    if site.engine != site.model:
        report_module(draft, site.model_argument, deepspeed.METHODS, rewrite)
    _start_group(draft, site)


def _rewrite(draft: Draft, site: Site, wish: Wish, access: cst.Attribute, call: cst.Call) -> bool:
    """``engine.backward(loss)`` and ``engine.step()``, as statements of their own."""
    statement = draft.view.parent(call)
    if not isinstance(statement, cst.Expr) or any(arg.star for arg in call.args):
        return False
    if access.attr.value == "backward" and len(call.args) == 1 and call.args[0].keyword is None:
        loss = draft.view.code(call.args[0].value)
        simple = isinstance(call.args[0].value, cst.Name | cst.Attribute | cst.Call)
        text = [f"{loss}.backward()" if simple else f"({loss}).backward()"]
    elif access.attr.value == "step" and not call.args and _sees(draft, site, call):
        clip = f"clip_grad_norm_({site.model}.parameters(), {wish.clipping})"
        text = [f"{site.optimizer}.step()", f"{site.optimizer}.zero_grad()"]
        text = [clip, *text] if wish.clipping else text
    else:
        return False
    made = [cst.Expr(cst.parse_expression(each)) for each in text]
    draft.edits[statement] = lambda _: cst.FlattenSentinel(made)
    written = draft.view.code(call)
    message = f"`{written}` is {', '.join(f'`{each}`' for each in text)}."
    draft.say(call, Kind.CHANGED, access.attr.value, message)
    return True


def _sees(draft: Draft, site: Site, node: cst.CSTNode) -> bool:
    """Whether model and optimizer are, where ``node`` is, what they are at ``site``."""
    names = site.model, site.optimizer
    return all(draft.view.is_same(name, node, site.line) for name in names)


def _start_group(draft: Draft, site: Site) -> None:
    """``deepspeed.initialize`` starts the process group if there is none: say what does now."""
    starts = [u for u in draft.view.uses if u.known and u.known.term is _INIT_DISTRIBUTED]
    for use in starts:
        call = draft.view.parent(use.node)
        if isinstance(call, cst.Call) and call.func is use.node:
            _start(draft, use, call)
    if not starts and "init_process_group" not in draft.view.module.code:
        why = "nothing in this file starts the process group, which `initialize` did."
        instead = (
            "call `torch.distributed.init_process_group()` before sharding, unless done already"
        )
        draft.say(site.line, Kind.HAND, _INIT_DISTRIBUTED.theirs, why, instead)


def _start(draft: Draft, use: Use, call: cst.Call) -> None:
    given = bind(call, ["dist_backend"])
    is_plain = given is not None and use.is_certain
    if not is_plain or not _has_torch(draft, call, Wish(precision={"": ""})):
        draft.leave(call, _INIT_DISTRIBUTED, "its arguments, or `torch`, cannot be followed.")
        return
    backends = [a.value for a in (given or {}).values() if not is_word(a.value, "None")]
    draft.consumed.add(use.node)
    draft.edits[call] = lambda node: node.with_changes(
        func=cst.parse_expression("torch.distributed.init_process_group"),
        args=[cst.Arg(each) for each in backends],
    )
    message = "`torch.distributed.init_process_group`."
    draft.say(call, Kind.CHANGED, _INIT_DISTRIBUTED.theirs, message)
    draft.differs(call, _INIT_DISTRIBUTED)
