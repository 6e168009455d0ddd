"""Plans every choice of a space; what choices have in common is planned once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from polyshard.planning import resharded
from polyshard_cli.plan.drafting import Subject, estimated, planned, probed
from polyshard_cli.plan.dry_run.planning import PlannedGroup
from polyshard_cli.plan.dry_run.probing import Probe
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.estimate.step import Step
from polyshard_cli.plan.request.settings import Settings
from polyshard_cli.plan.tuning.space import Choice, Space


class Measured(Protocol):
    """Anything that takes memory and time."""

    @property
    def memory_bytes(self) -> int:
        """The most that a device holds."""

    @property
    def seconds(self) -> float:
        """Of a step."""


M = TypeVar("M", bound=Measured)


def front_of(tried: Sequence[M]) -> tuple[M, ...]:
    """The Pareto front, the fastest first: each of the others takes more memory or time.

    Of several that are equal in both, the first.
    """
    front: list[M] = []
    for one in sorted(tried, key=_by_time):
        if not front or one.memory_bytes < front[-1].memory_bytes:
            front.append(one)
    return tuple(front)


def ranked(tried: Sequence[M], budget_bytes: int) -> tuple[M, ...]:
    """Those that fit, the fastest first; equally fast ones by memory, then as they were searched.

    Args:
        tried: in the order of the search.
        budget_bytes: of a device; 0: no limit.
    """
    fitting = [t for t in tried if not budget_bytes or t.memory_bytes <= budget_bytes]
    return tuple(sorted(fitting, key=_by_time))


def _by_time(one: Measured) -> tuple[float, int]:
    return one.seconds, one.memory_bytes


MOST_UNITS = 4000
"""Units that are planned, over all plans, before a search goes by rounds."""
MOST_MESHES = 3
"""Meshes with which a search by rounds goes on."""


@dataclass(frozen=True)
class Tried:
    """A choice, and what a step of it needs."""

    choice: Choice
    needs: Step

    @property
    def memory_bytes(self) -> int:
        """The most that a device holds."""
        return self.needs.memory.peak.total

    @property
    def seconds(self) -> float:
        """Of a step."""
        assert self.needs.timing is not None, "what did not run is refused"
        return self.needs.timing.step_seconds

    @property
    def sent_bytes(self) -> int:
        """In a step, by the engine and the model."""
        return sum(transfer.sent_bytes for transfer in self.needs.traffic)


@dataclass(frozen=True)
class Found:
    """All choices that work, in the order of the search, and why others do not."""

    tried: tuple[Tried, ...]
    refused: tuple[tuple[str, int], ...]
    """Reasons, and for how many choices each holds."""
    is_exhaustive: bool


class Search:
    """Plans and probes of one subject, each made once."""

    def __init__(self, settings: Settings, subject: Subject) -> None:
        """For ``settings`` whose batch is given: it stays the same on all meshes."""
        self._settings, self._subject = settings, subject
        self._plans: dict[object, tuple[PlannedGroup, ...] | PlanError] = {}
        self._probes: dict[object, Probe | PlanError] = {}

    def over(self, space: Space, budget_bytes: int) -> Found:
        """All choices of ``space``; of a large one, the best meshes first, and then the rest.

        The first round has each mesh with the first units, formats and tiers; the second has all
        choices with those meshes that make the fastest steps within the budget (or take least
        memory).
        """
        if space.plans * self._units(next(iter(space.choices()))) <= MOST_UNITS:
            return self.of(space.choices())
        word, patterns = next(iter(space.units.items()))
        plain = replace(
            space,
            units={word: patterns},
            quantize=space.quantize[:1],
            offload=space.offload[:1],
            blocks=0,
        )
        first = self.of(plain.choices())
        meshes = list(dict.fromkeys(t.choice.mesh for t in _best_first(first.tried, budget_bytes)))
        others = replace(space, meshes=tuple(meshes[:MOST_MESHES]))
        seen = set(plain.choices())
        second = self.of(choice for choice in others.choices() if choice not in seen)
        counts = Counter(dict(first.refused))
        counts.update(dict(second.refused))
        return Found((*first.tried, *second.tried), tuple(counts.items()), False)

    def _units(self, choice: Choice) -> int:
        try:
            return len(self._planned(choice))
        except PlanError:  # reported with the other refusals
            return 1

    def of(self, choices: Iterable[Choice]) -> Found:
        """What these need."""
        tried: list[Tried] = []
        refused: Counter[str] = Counter()
        for choice in choices:
            try:
                tried.append(self.one(choice))
            except PlanError as error:
                refused[str(error)] += 1
        return Found(tuple(tried), tuple(refused.items()), True)

    def one(self, choice: Choice) -> Tried:
        """What ``choice`` needs: the numbers of :func:`polyshard_cli.plan.draft`.

        Raises:
            PlanError: where the choice is refused, or the model does not run.
        """
        settings = choice.applied(self._settings)
        groups = self._planned(choice)
        if choice.reshard is not None:
            groups = tuple(replace(g, plan=resharded(g.plan, choice.reshard)) for g in groups)
        found = self._probed(choice, settings)
        if found.problem:
            raise PlanError(
                f"the model did not run on the meta device ({found.problem}), so no time is known; "
                "give its inputs with --inputs module:function"
            )
        return Tried(choice, estimated(self._subject, settings, groups, found))

    def _planned(self, choice: Choice) -> tuple[PlannedGroup, ...]:
        """Planned without tiers, which change where shards rest and nothing of what travels."""
        plain = replace(choice, reshard=None, offload="")
        made = self._plans.get(plain)
        if made is None:
            settings = plain.applied(self._settings)
            try:
                made = planned(self._subject, settings)
            except PlanError as error:
                made = error
            self._plans[plain] = made
        if isinstance(made, PlanError):
            raise made
        return made

    def _probed(self, choice: Choice, settings: Settings) -> Probe:
        """Of ranks that compute alike: replicas and shards see the same batch."""
        key = (choice.units, choice.mesh.size("tensor"), settings.local_batch)
        made = self._probes.get(key)
        if made is None:
            try:
                made = probed(self._subject, settings)
            except PlanError as error:
                made = error
            self._probes[key] = made
        if isinstance(made, PlanError):
            raise made
        return made


def _best_first(tried: Sequence[Tried], budget_bytes: int) -> list[Tried]:
    """The fastest that fit, then the smallest of the others."""
    others = [t for t in tried if budget_bytes and t.memory_bytes > budget_bytes]
    smallest = sorted(others, key=lambda t: (t.memory_bytes, t.seconds))
    return [*ranked(tried, budget_bytes), *smallest]
