"""What is searched: values of each setting that was left open, and why others are not tried."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import product

from polyshard_cli.plan.drafting import Subject
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.estimate.memory import STATES
from polyshard_cli.plan.request.mesh import MeshSpec
from polyshard_cli.plan.request.model import built
from polyshard_cli.plan.request.plugins import tensor_plan
from polyshard_cli.plan.request.settings import Settings
from polyshard_cli.plan.tuning.boundaries import boundaries_of
from polyshard_cli.plan.tuning.choice import Choice
from polyshard_cli.plan.tuning.meshes import divisors, meshes_of

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
            close = difflib.get_close_matches(name, KEEPABLE, n=1, cutoff=0) or ["mesh"]
            raise PlanError(
                f"--keep {name}: nothing that is searched is called so; did you mean {close[0]}? "
                f"Known: {', '.join(KEEPABLE)}"
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
    """What ``given`` leaves open in ``settings``.

    Raises:
        PlanError: for a model that cannot be built.
    """
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
        sizes = _tensor_sizes(settings, subject, skipped)
    return meshes_of(mesh, sizes, keeps_replicas="replicate" in given.keep)


def _tensor_sizes(settings: Settings, subject: Subject, skipped: list[str]) -> tuple[int, ...]:
    """Within a host, where layers communicate all the time; more only if that is what was given."""
    mesh = settings.mesh
    most = max(subject.machine.ranks_per_host, mesh.size("tensor"))
    sizes = tuple(size for size in divisors(mesh.ranks) if size <= most)
    if sizes == (1,):
        return sizes
    reason = ""
    if find_spec("polyshard_tensor_parallel") is None:
        reason = "polyshard-tensor-parallel is not installed"
    else:
        try:
            tensor_plan(settings, subject.loaded, built(subject.loaded))
        except PlanError:
            reason = f"no ready-made plan fits {subject.loaded.name}; give --tp-plan"
    if reason:
        skipped.append(f"tensor parallelism: {reason}")
    return (mesh.size("tensor"),) if reason else sizes


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
    elif subject.machine.is_host:
        skipped.append("tiers: the host is the device of this machine")
    else:
        has_state = STATES[settings.optimizer] > 0
        return ("", *(text for text in TIERS if has_state or "optimizer" not in text))
    return ("",)


def with_batch(settings: Settings) -> Settings:
    """With the batch that its mesh stands for, so that all meshes do the same work."""
    return replace(settings, batch=settings.batch or settings.mesh.data_ranks)
