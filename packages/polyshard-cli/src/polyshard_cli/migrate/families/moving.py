"""Names that polyshard has too: FSDP2's, and ``clip_grad_norm_`` where something is sharded."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from polyshard_cli.migrate.editing.draft import WHOLE, Draft
from polyshard_cli.migrate.editing.finding import Kind
from polyshard_cli.migrate.source.view import Use, dotted, walk
from polyshard_cli.migrate.terms.catalog import Known, know

__all__ = ["imported", "move_clipping", "move_names"]

Imported = tuple[cst.ImportFrom, cst.ImportAlias, Known]


def imported(draft: Draft) -> Iterator[Imported]:
    """Names of a table that ``from ... import`` binds."""
    for node in walk(draft.view.module):
        if not isinstance(node, cst.ImportFrom) or isinstance(node.names, cst.ImportStar):
            continue
        if node.relative or node.module is None:
            continue
        for alias in node.names:
            known = know(f"{dotted(node.module)}.{alias.evaluated_name}")
            if known is not None:
                yield node, alias, known


def move_names(draft: Draft) -> None:
    """Import FSDP2's names from polyshard; their uses stay, or lose the prefix of a module."""
    for node, alias, known in imported(draft):
        if known.family == "fsdp2":
            _move(draft, node, alias, known)
    for use in draft.view.uses:
        if use.known and use.known.family == "fsdp2" and isinstance(use.node, cst.Attribute):
            _prefix(draft, use, use.known.name)


def move_clipping(draft: Draft) -> None:
    """The same for ``clip_grad_norm_``, which takes plain tensors as torch's does."""
    name = "clip_grad_norm_"
    for node, alias, known in imported(draft):
        if known.family == "clip":
            _move(draft, node, alias, known)
    for use in draft.view.uses:
        if use.known is None or use.known.family != "clip" or draft.is_consumed(use.node):
            continue
        if isinstance(use.node, cst.Attribute):
            _prefix(draft, use, name)
        elif use.is_certain:
            draft.say(use.node, Kind.CHANGED, use.known.name, f"`polyshard.{name}`.")
        _result(draft, use)


def _move(draft: Draft, node: cst.ImportFrom, alias: cst.ImportAlias, known: Known) -> None:
    name = alias.evaluated_alias or alias.evaluated_name
    if draft.view.is_rebound(alias, node):
        why = f"`{name}` is bound to something else as well."
        draft.say(
            node, Kind.HAND, known.name, why, f"import it from polyshard, if `{name}` is torch's"
        )
        return
    draft.moved.add(alias)
    if known.family == "fsdp2":
        draft.say(node, Kind.CHANGED, known.name, f"`{name}` is imported from polyshard.")
    draft.differs(node, known.term)


def _prefix(draft: Draft, use: Use, name: str) -> None:
    """``fsdp.fully_shard`` becomes ``polyshard.fully_shard``."""
    assert use.known is not None
    written = draft.view.code(use.node)
    instead = f"write polyshard.{name} if it is that function"
    if not use.is_certain:
        why = f"`{written}`: its first name is bound to something else as well."
    elif not draft.can_want(use, WHOLE):
        why = f"`{written}`: `polyshard` is bound to something else here."
    else:
        draft.want(use, WHOLE)
        draft.consumed.add(use.node)
        draft.edits[use.node] = lambda node: node.with_changes(
            value=cst.Name(WHOLE), attr=cst.Name(name)
        )
        draft.say(use.node, Kind.CHANGED, use.known.name, f"`{written}` is `polyshard.{name}`.")
        draft.differs(use.node, use.known.term)
        return
    draft.say(use.node, Kind.HAND, use.known.name, why, instead)


def _result(draft: Draft, use: Use) -> None:
    """List ``.full_tensor()`` of what clipping returned."""
    assert use.known is not None
    call = draft.view.parent(use.node)
    user = draft.view.parent(call) if isinstance(call, cst.Call) else None
    readers: list[cst.CSTNode] = [user] if isinstance(user, cst.Attribute) else []
    if isinstance(user, cst.Assign) and len(user.targets) == 1:
        mentions = draft.view.mentions(user.targets[0].target)
        readers = [parent for each in mentions if (parent := draft.view.parent(each))]
    for reader in readers:
        if isinstance(reader, cst.Attribute) and reader.attr.value in {"full_tensor", "to_local"}:
            why = f"the norm is a plain tensor and has no `{reader.attr.value}`."
            draft.say(reader, Kind.HAND, use.known.name, why, "use the norm as it is")
