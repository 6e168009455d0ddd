"""What in a newer API breaks callers of an older one. Arithmetic on :class:`PublicApi` s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from public_api import EITHER, KEYWORD, KEYWORDS, POSITION, REST, Entry, Parameter, PublicApi


@dataclass(frozen=True)
class Break:
    """One way in which a caller's code stops working."""

    name: str
    how: str

    def __str__(self) -> str:
        return f"{self.name}: {self.how}"


def breaks(old: PublicApi, new: PublicApi) -> list[Break]:
    """Of all names; a class that is gone is said once, without its members."""
    found = []
    for name, entry in old.names.items():
        owner = name.rpartition(".")[0]
        if name in new.names:
            found += [Break(name, how) for how in _changes(entry, new.names[name])]
        elif owner not in old.names or owner in new.names:
            found.append(Break(name, "is gone"))
    return found


def hook_problems(old: PublicApi, new: PublicApi) -> list[str]:
    """Changes of hooks that ``HOOK_API`` does not tell plugins of."""
    gone = sorted(old.hooks.keys() - new.hooks.keys())
    added = sorted(new.hooks.keys() - old.hooks.keys())
    for name in old.hooks.keys() & new.hooks.keys():
        before, now = set(old.hooks[name]), set(new.hooks[name])
        gone += [f"{name}({argument})" for argument in sorted(before - now)]
        added += [f"{name}({argument})" for argument in sorted(now - before)]
    if gone and new.hook_api[0] == old.hook_api[0]:
        return [
            f"HOOK_API {new.hook_api}: {', '.join(gone)} cannot be implemented any more; raise the "
            "first number"
        ]
    if added and new.hook_api == old.hook_api:
        return [f"HOOK_API {new.hook_api}: {', '.join(added)} is new; raise the second number"]
    return []


def _changes(old: Entry, new: Entry) -> Iterator[str]:
    if new.kind != old.kind:
        yield f"was a {old.kind}, is a {new.kind}"
        return
    for base in old.bases:
        if old.kind == "class" and base not in new.bases:
            yield f"is no {base} any more"
    yield from _call_changes(
        [Parameter.read(text) for text in old.parameters],
        [Parameter.read(text) for text in new.parameters],
    )


def _call_changes(old: list[Parameter], new: list[Parameter]) -> Iterator[str]:
    known = {parameter.name: parameter for parameter in new}
    catches = {each.kind for each in new}
    yield from _moves(old, new)
    for was in old:
        now = known.get(was.name)
        if now is not None:
            yield from _parameter_changes(was, now, catches)
        elif not (was.kind == KEYWORD and KEYWORDS in catches):
            yield f"takes no {was.name} any more"
    had = {parameter.name for parameter in old}
    for now in new:
        if now.name not in had and not now.has_default and now.kind not in {REST, KEYWORDS}:
            yield f"needs {now.name}"


def _moves(old: list[Parameter], new: list[Parameter]) -> Iterator[str]:
    """Of those that are passed by position."""
    before = [each.name for each in old if each.kind in {POSITION, EITHER}]
    places = [each.name for each in new if each.kind in {POSITION, EITHER}]
    for place, name in enumerate(before):
        if name in places and places.index(name) != place:
            yield f"{name} moved from place {place + 1} to {places.index(name) + 1}"


def _parameter_changes(was: Parameter, now: Parameter, catches: set[str]) -> Iterator[str]:
    if was.has_default and not now.has_default:
        yield f"{was.name} has no default any more"
    if was.kind in {POSITION, EITHER} and now.kind == KEYWORD and REST not in catches:
        yield f"{was.name} is taken by keyword only"
    if was.kind in {EITHER, KEYWORD} and now.kind == POSITION:
        yield f"{was.name} is taken by position only"
