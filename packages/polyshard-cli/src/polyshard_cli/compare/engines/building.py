"""From a spec and a job to a model that an engine trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from polyshard_cli.compare.engines import sharded, wrapped
from polyshard_cli.compare.engines.built import Built, Place, Unit
from polyshard_cli.compare.engines.spec import Spec
from polyshard_cli.compare.errors import JobError
from polyshard_cli.compare.job.job import Job
from polyshard_cli.plan.dry_run.units import Units, units_of
from polyshard_cli.plan.errors import PlanError

__all__ = ["build", "units_to_shard"]

Builder = Callable[[Spec, Job, Iterable[Unit], Place], Built]

BUILDERS: Final[Mapping[str, Builder]] = MappingProxyType(
    {
        "polyshard": sharded.polyshard,
        "fsdp2": sharded.fsdp2,
        "fsdp1": wrapped.fsdp1,
        "ddp": wrapped.ddp,
        "single": wrapped.single,
    }
)


def units_to_shard(job: Job, patterns: tuple[str, ...]) -> Units:
    """Modules that become units, as ``polyshard plan`` finds them.

    Raises:
        JobError: for a pattern that no module matches.
    """
    try:
        return units_of(job.model, patterns or job.units)
    except PlanError as error:
        raise JobError(str(error)) from error


def build(spec: Spec, job: Job, units: Iterable[Unit], place: Place) -> Built:
    """The job's model as the engine of ``spec`` trains it; on every rank."""
    return BUILDERS[spec.kind](spec, job, units, place)
