"""The order of plugins: what they declare, then their names; never how they were passed."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from polyshard.errors import ConflictError, PluginError
from polyshard.plugins.contract import Contract
from polyshard.plugins.needs import unmet


def check_relations(contracts: Sequence[Contract]) -> None:
    """Missing requirements and conflicts, all reported at once.

    Raises:
        PluginError: for requirements nobody meets.
        ConflictError: when plugins exclude each other (and nothing else is wrong).
    """
    words = ", ".join(sorted({word for c in contracts for word in c.answers_to()}))
    problems = [
        f"plugin '{contract.name}' {need} (present: {words}); add one to plugins="
        for contract in contracts
        for need in unmet(contract, contracts, "of the stack")
    ]
    conflicts = [
        f"plugin '{a.name}' conflicts with '{b.name}' (declared by '{a.name}': "
        f"{', '.join(sorted(a.conflicts_with & b.answers_to()))}); drop one of them from plugins="
        for a in contracts
        for b in contracts
        if a is not b and a.conflicts_with & b.answers_to()
    ]
    if problems:
        raise PluginError("\n".join(problems + conflicts))
    if conflicts:
        raise ConflictError("\n".join(conflicts))


def order(contracts: Sequence[Contract]) -> list[str]:
    """Names in plugin order: ``before`` and ``after`` hold, ties go by name.

    Raises:
        ConflictError: showing the circle, when the declarations form one.
    """
    later = _later(contracts)
    ordered = _sorted(later)
    if len(ordered) < len(later):
        raise ConflictError(
            f"plugins cannot be ordered: {' before '.join(_circle(later, set(ordered)))}. Remove "
            "one of these before= or after= declarations."
        )
    return ordered


def circle_of(contracts: Sequence[Contract]) -> list[str]:
    """Names of plugins that declare to come before each other, the first repeated; or none."""
    later = _later(contracts)
    ordered = _sorted(later)
    return _circle(later, set(ordered)) if len(ordered) < len(later) else []


def _later(contracts: Sequence[Contract]) -> dict[str, set[str]]:
    """By name, the plugins that have to come later."""
    present = {c.name for c in contracts}
    later: dict[str, set[str]] = {name: set() for name in present}
    for contract in contracts:
        later[contract.name] |= contract.before & present
        for earlier in contract.after & present:
            later[earlier].add(contract.name)
    return later


def _sorted(later: Mapping[str, set[str]]) -> list[str]:
    """Names in order, without those that wait for each other in a circle."""
    waits = dict.fromkeys(later, 0)
    for targets in later.values():
        for target in targets:
            waits[target] += 1
    ready = [name for name, count in waits.items() if count == 0]
    heapq.heapify(ready)
    ordered: list[str] = []
    while ready:
        name = heapq.heappop(ready)
        ordered.append(name)
        for target in later[name]:
            waits[target] -= 1
            if waits[target] == 0:
                heapq.heappush(ready, target)
    return ordered


def _circle(later: Mapping[str, set[str]], done: set[str]) -> list[str]:
    # Every plugin left waits for another one left: following those backwards must repeat one.
    left = sorted(set(later) - done)
    path = [left[0]]
    while True:
        previous = next(name for name in left if path[-1] in later[name])
        if previous in path:
            return [previous, *reversed(path[path.index(previous) :])]
        path.append(previous)
