"""What is searched: values of each setting that was left open, and why others are not tried."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import product

from torch import nn

from polyshard_cli.plan.drafting import Subject
from polyshard_cli.plan.dry_run.units import NONE, repeated
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.estimate.memory import STATES
from polyshard_cli.plan.request.mesh import Axis, MeshSpec, Role
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

    @classmethod
    def of(cls, settings: Settings) -> Choice:
        """The one that ``settings`` make."""
        return cls(
            settings.mesh, settings.units, settings.reshard, settings.quantize, settings.offload
        )

    def applied(self, settings: Settings) -> Settings:
        """``settings`` with this choice.

        Raises:
            PlanError: where the batch does not divide over the mesh.
        """
        return replace(
            settings,
            mesh=self.mesh,
            units=self.units,
            reshard=self.reshard,
            quantize=self.quantize,
            offload=self.offload,
        )

    @property
    def name(self) -> str:
        """Options that make it, as a person writes them."""
        words = [f"--mesh {mesh_text(self.mesh)}"]
        words += [f"--units '{pattern}'" for pattern in self.units]
        words += [f"--reshard {reshard_text(self.reshard)}"] * (self.reshard is not None)
        words += [f"--quantize {self.quantize}"] * bool(self.quantize)
        words += [f"--offload {self.offload}"] * bool(self.offload)
        return " ".join(words)


def mesh_text(mesh: MeshSpec) -> str:
    """As ``--mesh`` takes it."""
    return ",".join(f"{axis.name}={axis.size}" for axis in mesh.axes)


def reshard_text(reshard: bool | int | None) -> str:
    """As ``--reshard`` takes it."""
    if reshard is None:
        return "auto"
    return {True: "yes", False: "no"}[reshard] if isinstance(reshard, bool) else str(reshard)


NAMES: dict[Role, str] = {"replicate": "replicate", "tensor": "tp"}


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
    return tuple(dict.fromkeys([given, *_others(given, sorted(tensor_sizes), keeps_replicas)]))


def _others(
    given: MeshSpec, tensor_sizes: Iterable[int], keeps_replicas: bool
) -> Iterator[MeshSpec]:
    for tensor in tensor_sizes:
        if given.ranks % tensor:
            continue
        data = given.ranks // tensor
        counts = (given.size("replicate"),) if keeps_replicas else divisors(data)
        for replicas in counts:
            if data % replicas == 0:
                yield _mesh(given, replicas, data // replicas, tensor)


def _mesh(given: MeshSpec, replicas: int, shards: int, tensor: int) -> MeshSpec:
    axes = [
        _axis(given, "replicate", replicas),
        Axis(given.name("shard"), shards, "shard"),
        _axis(given, "tensor", tensor),
    ]
    if given.name("shard").startswith("dp_"):
        axes[0] = _axis(given, "replicate", replicas, "dp_replicate")
    return MeshSpec(tuple(axis for axis in axes if axis.size > 1 or axis.role == "shard"))


def _axis(given: MeshSpec, role: Role, size: int, name: str = "") -> Axis:
    return Axis(given.name(role) or name or NAMES[role], size, role)


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
    parts = tuple(_parts(blocks))
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


def _parts(blocks: dict[str, nn.Module]) -> Iterator[str]:
    """Children of blocks that hold matrices, one pattern for all blocks of a list."""
    seen: set[str] = set()
    for name, block in blocks.items():
        for child, module in block.named_children():
            pattern = f"{name.rpartition('.')[0]}.*.{child}"
            if pattern not in seen and _has_matrices(module, recurse=True):
                seen.add(pattern)
                yield pattern


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
