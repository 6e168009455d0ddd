"""polyshard and torch's FSDP2, which take the same calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyshard_cli.compare.engines.built import Built, Place, Unit
from polyshard_cli.compare.engines.plugins import make_stack
from polyshard_cli.compare.engines.spec import Spec
from polyshard_cli.compare.job.job import Job

__all__ = ["fsdp2", "polyshard"]


def polyshard(spec: Spec, job: Job, units: Iterable[Unit], place: Place) -> Built:
    """``polyshard.fully_shard`` on every unit and the model, with the plugins of ``spec``."""
    from polyshard import MixedPrecisionPolicy, describe, fully_shard, stats

    stack = make_stack(spec)
    keywords = _keywords(spec, place, MixedPrecisionPolicy)
    keywords["plugins"] = (*stack.plugins, *keywords.get("plugins", ()))
    model = job.model
    for unit in (*units, (model,)):
        fully_shard(_called(unit), **keywords)
    return Built(
        model,
        stack.wrap(job.optimizer(model)),
        lambda: stats(model).bytes_sent,
        lambda: str(describe(model)),
    )


def fsdp2(spec: Spec, job: Job, units: Iterable[Unit], place: Place) -> Built:
    """``torch.distributed.fsdp.fully_shard`` on the same modules."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    keywords = _keywords(spec, place, MixedPrecisionPolicy)
    if spec.offload:
        keywords["offload_policy"] = CPUOffloadPolicy(pin_memory=place.device.type != "cpu")
    for unit in (*units, (job.model,)):
        fully_shard(_called(unit), **keywords)
    return Built(job.model, job.optimizer(job.model))


def _called(unit: Unit) -> Any:
    """As both libraries take it: a module, or a list of several that make one unit."""
    return list(unit) if len(unit) > 1 else unit[0]


def _mesh(spec: Spec, place: Place) -> DeviceMesh:
    if spec.replicas == 1:
        return init_device_mesh(place.device.type, (place.ranks,), mesh_dim_names=("dp",))
    shape = (spec.replicas, place.ranks // spec.replicas)
    return init_device_mesh(place.device.type, shape, mesh_dim_names=("replicate", "shard"))


def _keywords(spec: Spec, place: Place, policy: Any) -> dict[str, Any]:
    """What both libraries' ``fully_shard`` take alike."""
    found = dict(spec.keywords)
    if "mesh" not in found:
        found["mesh"] = _mesh(spec, place)
    if spec.bf16:
        found["mp_policy"] = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if spec.keep:
        found["reshard_after_forward"] = False
    return found
