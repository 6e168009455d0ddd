"""What is searched (values of each setting that was left open, and why others are not tried), and
the search: it plans every choice; what choices have in common is planned once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any, TypeVar

from torch import nn

from polyshard.planning import resharded
from polyshard_cli.plan.drafting import Subject, estimated, planned, probed
from polyshard_cli.plan.dry_run.planning import PlannedGroup
from polyshard_cli.plan.dry_run.probing import Probe
from polyshard_cli.plan.dry_run.units import NONE, repeated
from polyshard_cli.plan.errors import PlanError, nearest
from polyshard_cli.plan.estimate.memory import STATES
from polyshard_cli.plan.estimate.timing import Step, Timing
from polyshard_cli.plan.request.mesh import Axis, MeshSpec
from polyshard_cli.plan.request.model import built
from polyshard_cli.plan.request.plugins import tensor_plan
from polyshard_cli.plan.request.settings import Settings


@dataclass(frozen=True)
class Choice:
    """Settings that a search varies, in the words of the command's options."""

    mesh: MeshSpec
    units: tuple[str, ...] = ()
    reshard: bool | int | None = None
    quantize: str = ""
    offload: str = ""

    def applied(self, settings: Settings) -> Settings:
        """``settings`` with this choice."""
        return replace(settings, **vars(self))

    @property
    def name(self) -> str:
        """Options that make it, as a person writes them."""
        words = [f"--mesh {self.mesh.text}"]
        words += [f"--units '{pattern}'" for pattern in self.units]
        words += [f"--reshard {reshard_text(self.reshard)}"] * (self.reshard is not None)
        words += [f"--quantize {self.quantize}"] * bool(self.quantize)
        words += [f"--offload {self.offload}"] * bool(self.offload)
        return " ".join(words)


def reshard_text(reshard: bool | int | None) -> str:
    """As ``--reshard`` takes it."""
    if reshard is None:
        return "auto"
    return {True: "yes", False: "no"}[reshard] if isinstance(reshard, bool) else str(reshard)


def divisors(number: int) -> tuple[int, ...]:
    """All of them, from 1 to ``number``."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def meshes_of(
    given: MeshSpec, tensor_sizes: Iterable[int], *, keeps_replicas: bool = False
) -> tuple[MeshSpec, ...]:
    """``given``, then every other mesh of its ranks, small axes beside the shards first.

    Args:
        given: names the axes; those of one rank are left out of others.
        tensor_sizes: ranks of tensor parallelism to try; those that do not divide are left out.
        keeps_replicas: whether the number of replicas stays as it is.
    """
    shards = given.name("shard")
    copies = given.name("replicate") or f"{'dp_' * shards.startswith('dp_')}replicate"
    found = [given]
    for tensor in sorted(tensor_sizes):
        data = given.ranks // tensor if given.ranks % tensor == 0 else 0
        for replicas in (given.size("replicate"),) if keeps_replicas else divisors(data):
            if data and data % replicas == 0:
                axes = (
                    Axis(copies, replicas, "replicate"),
                    Axis(shards, data // replicas, "shard"),
                    Axis(given.name("tensor") or "tp", tensor, "tensor"),
                )
                found.append(MeshSpec(tuple(a for a in axes if a.size > 1 or a.role == "shard")))
    return tuple(dict.fromkeys(found))


RUNS = (2, 4)
"""Blocks that may be one unit together."""


def boundaries_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Patterns for ``--units`` by a word for them, the plainest first.

    Blocks alone (no patterns), with tables (what holds matrices outside of blocks) as units of
    their own, several to a unit, cut into their parts, and no units at all.
    """
    blocks = repeated(model)
    tables = tuple(_tables(model, blocks))
    if not blocks:
        return {"none": (NONE,)} | ({"tables": tables} if tables else {})
    lists = dict.fromkeys(name.rpartition(".")[0] for name in blocks)
    stars = tuple(f"{name}.*" for name in lists)
    # Children of blocks that hold matrices, one pattern for all blocks of a list.
    parts = tuple(
        dict.fromkeys(
            f"{name.rpartition('.')[0]}.*.{child}"
            for name, block in blocks.items()
            for child, module in block.named_children()
            if _has_matrices(module, recurse=True)
        )
    )
    shortest = min(sum(n.rpartition(".")[0] == name for n in blocks) for name in lists)
    found: dict[str, tuple[str, ...]] = {"blocks": ()}
    if tables:
        found["blocks, tables"] = (*stars, *tables)
    for run in RUNS:
        if shortest >= 2 * run:
            found[f"{run} blocks"] = tuple(f"{star}/{run}" for star in stars)
    if len(parts) > 1:
        found["parts"] = parts
        found["parts, tables"] = (*parts, *tables)
    return found | {"none": (NONE,)}


def _tables(model: nn.Module, blocks: dict[str, nn.Module]) -> Iterator[str]:
    """Modules with matrices of their own outside of blocks, such as an embedding."""
    for name, module in model.named_modules():
        is_inside = any(name == block or name.startswith(f"{block}.") for block in blocks)
        if name and not is_inside and _has_matrices(module, recurse=False):
            yield name


def _has_matrices(module: nn.Module, *, recurse: bool) -> bool:
    return any(p.ndim > 1 for p in module.parameters(recurse=recurse))


KEEPABLE = ("mesh", "replicate", "tp", "units", "reshard", "quantize", "offload")
FORMATS = ("int8,native", "int8", "int4")
TIERS = ("optimizer=host,fraction=0.5", "optimizer=host", "params=host")


@dataclass(frozen=True, kw_only=True)
class Open:
    """What a search may change.

    Attributes:
        keep: of :data:`KEEPABLE`: what stays as the settings have it, even if that is a default.
            What the settings choose (units, reshard, quantize, offload) stays in any case.
        allow_lossy: whether codecs may change the values that travel.
    """

    keep: frozenset[str] = frozenset()
    allow_lossy: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be kept."""
        for name in sorted(self.keep - set(KEEPABLE)):
            raise PlanError(
                f"--keep {name}: nothing that is searched is called so; did you mean "
                f"{nearest(name, KEEPABLE, 0)}? Known: {', '.join(KEEPABLE)}"
            )


@dataclass(frozen=True)
class Space:
    """Values of each setting; the first of each is what the settings have."""

    meshes: tuple[MeshSpec, ...]
    units: Mapping[str, tuple[str, ...]]
    """Patterns by a word for them."""
    quantize: tuple[str, ...]
    offload: tuple[str, ...]
    reshard: tuple[bool | int | None, ...]
    blocks: int = 0
    """Ranks of the largest blocks that are tried, too: those of a host, whose links are fast."""
    skipped: tuple[str, ...] = ()
    """What is not searched, and why."""

    def choices(self) -> Iterator[Choice]:
        """All of them, in an order that does not depend on anything else."""
        planned = product(self.meshes, self.units.values(), self.quantize)
        for mesh, units, quantize in planned:
            for reshard, offload in product(self.reshards(mesh), self.offload):
                yield Choice(mesh, units, reshard, quantize, offload)

    def reshards(self, mesh: MeshSpec) -> tuple[bool | int | None, ...]:
        """Those that ``mesh`` has."""
        sizes = divisors(mesh.size("shard"))[1:-1]
        return (*self.reshard, *(size for size in sizes if size <= self.blocks))

    @property
    def plans(self) -> int:
        """How many of the choices differ in more than arithmetic."""
        return len(self.meshes) * len(self.units) * len(self.quantize)


def space_of(settings: Settings, subject: Subject, given: Open) -> Space:
    """What ``given`` leaves open in ``settings``."""
    skipped: list[str] = []
    model = built(subject.loaded)
    is_resharding_open = "reshard" not in given.keep and settings.reshard is None
    units = {"as given" if settings.units else "blocks": settings.units}
    if "units" not in given.keep and not settings.units:
        units = boundaries_of(model)
    return Space(
        meshes=_meshes(settings, subject, given, skipped),
        units=units,
        quantize=_formats(settings, given, skipped),
        offload=_tiers(settings, subject, given, skipped),
        reshard=(None, False) if is_resharding_open else (settings.reshard,),
        blocks=subject.machine.ranks_per_host if is_resharding_open else 0,
        skipped=tuple(skipped),
    )


def _meshes(
    settings: Settings, subject: Subject, given: Open, skipped: list[str]
) -> tuple[MeshSpec, ...]:
    mesh = settings.mesh
    if "mesh" in given.keep:
        return (mesh,)
    sizes: tuple[int, ...] = (mesh.size("tensor"),)
    if "tp" not in given.keep:
        # Within a host, where layers communicate all the time; more only if that was given.
        most = max(subject.machine.ranks_per_host, *sizes)
        found = tuple(size for size in divisors(mesh.ranks) if size <= most)
        reason = _no_tensor_plan(settings, subject) if found != (1,) else ""
        if reason:
            skipped.append(f"tensor parallelism: {reason}")
        else:
            sizes = found
    return meshes_of(mesh, sizes, keeps_replicas="replicate" in given.keep)


def _no_tensor_plan(settings: Settings, subject: Subject) -> str:
    """Why layers cannot be divided; empty where they can."""
    if find_spec("polyshard_tensor_parallel") is None:
        return "polyshard-tensor-parallel is not installed"
    try:
        tensor_plan(settings, subject.loaded, built(subject.loaded))
    except PlanError:
        return f"no ready-made plan fits {subject.loaded.name}; give --tp-plan"
    return ""


def _formats(settings: Settings, given: Open, skipped: list[str]) -> tuple[str, ...]:
    if settings.quantize or "quantize" in given.keep:
        return (settings.quantize,)
    if find_spec("polyshard_quantized") is None:
        skipped.append("codecs: polyshard-quantized is not installed")
    elif not given.allow_lossy:
        skipped.append("codecs: they change what travels; --allow-lossy tries them")
    else:
        known = import_module("polyshard_quantized").format_names()
        return ("", *(text for text in FORMATS if text.partition(",")[0] in known))
    return ("",)


def _tiers(
    settings: Settings, subject: Subject, given: Open, skipped: list[str]
) -> tuple[str, ...]:
    if settings.offload or "offload" in given.keep:
        return (settings.offload,)
    if find_spec("polyshard_offload") is None:
        skipped.append("tiers: polyshard-offload is not installed")
    elif not subject.machine.is_ahead:
        skipped.append("tiers: the host is the device of this machine")
    else:
        has_state = STATES[settings.optimizer] > 0
        return ("", *(text for text in TIERS if has_state or "optimizer" not in text))
    return ("",)


def with_batch(settings: Settings) -> Settings:
    """With the batch that its mesh stands for, so that all meshes do the same work."""
    parts = settings.mesh.data_ranks * settings.accumulate
    return replace(settings, batch=settings.batch or parts)


T = TypeVar("T")
MOST_UNITS = 4000
"""Units that are planned, over all plans, before a search goes by rounds."""
MOST_MESHES = 3
"""Meshes with which a search by rounds continues."""


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
    def timing(self) -> Timing:
        """Of a step."""
        assert self.needs.timing is not None, "what did not run is refused"
        return self.needs.timing

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.timing.step_seconds

    @property
    def sent_bytes(self) -> int:
        """In a step, by the engine and the model."""
        return sum(transfer.sent_bytes for transfer in self.needs.traffic)


def front_of(tried: Sequence[Tried]) -> tuple[Tried, ...]:
    """The Pareto front, the fastest first: each of the others takes more memory or time.

    Of several that are equal in both, the first.
    """
    front: list[Tried] = []
    for one in sorted(tried, key=_by_time):
        if not front or one.memory_bytes < front[-1].memory_bytes:
            front.append(one)
    return tuple(front)


def ranked(tried: Sequence[Tried], budget_bytes: int) -> tuple[Tried, ...]:
    """Those that fit (0: no limit), the fastest first; equals by memory, then as searched."""
    fitting = [t for t in tried if not budget_bytes or t.memory_bytes <= budget_bytes]
    return tuple(sorted(fitting, key=_by_time))


def _by_time(one: Tried) -> tuple[float, int]:
    return one.seconds, one.memory_bytes


@dataclass(frozen=True)
class Found:
    """All choices that work, in the order of the search, and why others do not."""

    tried: tuple[Tried, ...]
    refused: Counter[str]
    """Reasons, and for how many choices each holds."""
    is_exhaustive: bool


class Search:
    """Plans and probes of one subject, each made once."""

    def __init__(self, settings: Settings, subject: Subject) -> None:
        """For ``settings`` whose batch is given: it stays the same on all meshes."""
        self._settings, self._subject = settings, subject
        self._made: dict[object, Any] = {}

    def over(self, space: Space, budget_bytes: int) -> Found:
        """All choices of ``space``; of a large one, the best meshes first, and then the rest.

        The first round has each mesh with the first units, formats and tiers; the second has all
        choices with those meshes that make the fastest steps within the budget (or take least
        memory).
        """
        if space.plans * self._units(next(iter(space.choices()))) <= MOST_UNITS:
            return self.of(space.choices())
        plain = replace(
            space,
            units=dict([next(iter(space.units.items()))]),
            quantize=space.quantize[:1],
            offload=space.offload[:1],
            blocks=0,
        )
        first = self.of(plain.choices())
        meshes = list(dict.fromkeys(t.choice.mesh for t in _best_first(first.tried, budget_bytes)))
        others = replace(space, meshes=tuple(meshes[:MOST_MESHES]))
        seen = set(plain.choices())
        second = self.of(choice for choice in others.choices() if choice not in seen)
        return Found((*first.tried, *second.tried), first.refused + second.refused, False)

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
        return Found(tuple(tried), refused, True)

    def one(self, choice: Choice) -> Tried:
        """What ``choice`` needs: the numbers of :func:`polyshard_cli.plan.draft`."""
        settings = choice.applied(self._settings)
        groups = self._planned(choice)
        ranks = choice.mesh.size("shard")
        if choice.reshard is not None and ranks % int(choice.reshard or 1):
            raise PlanError(f"--reshard {choice.reshard} must divide the shard axis' {ranks} ranks")
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
        return self._once(plain, lambda: planned(self._subject, plain.applied(self._settings)))

    def _probed(self, choice: Choice, settings: Settings) -> Probe:
        """Of ranks that compute alike: replicas and shards see the same batch."""
        key = (choice.units, choice.mesh.size("tensor"), settings.local_batch)
        return self._once(key, lambda: probed(self._subject, settings))

    def _once(self, key: object, make: Callable[[], T]) -> T:
        """What ``make`` makes, or its refusal, the same each time."""
        if key not in self._made:
            try:
                self._made[key] = make()
            except PlanError as error:
                self._made[key] = error
        made: T | PlanError = self._made[key]
        if isinstance(made, PlanError):
            raise made
        return made


def _best_first(tried: Sequence[Tried], budget_bytes: int) -> list[Tried]:
    """The fastest that fit, then the smallest of the others."""
    others = [t for t in tried if budget_bytes and t.memory_bytes > budget_bytes]
    smallest = sorted(others, key=lambda t: (t.memory_bytes, t.seconds))
    return [*ranked(tried, budget_bytes), *smallest]
