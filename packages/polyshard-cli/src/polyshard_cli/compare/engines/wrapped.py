"""torch's older engines, which put a module around the model; and one process without any."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from polyshard_cli.compare.engines.built import Built, Place, Unit
from polyshard_cli.compare.engines.spec import Spec
from polyshard_cli.compare.job.job import Job

__all__ = ["ddp", "fsdp1", "single"]


def fsdp1(spec: Spec, job: Job, units: Iterable[Unit], place: Place) -> Built:
    """``FullyShardedDataParallel`` around the same modules, with the original parameters.

    It knows no unit of several modules: each is one of its own.
    """
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        MixedPrecision,
        ShardingStrategy,
    )
    from torch.distributed.fsdp.wrap import CustomPolicy

    chosen = set(chain.from_iterable(units))
    keywords: dict[str, Any] = {}
    if spec.bf16:
        reduce = torch.float32
        keywords["mixed_precision"] = MixedPrecision(torch.bfloat16, reduce_dtype=reduce)
    if spec.keep:
        keywords["sharding_strategy"] = ShardingStrategy.SHARD_GRAD_OP
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is old
        model = FullyShardedDataParallel(
            job.model,
            auto_wrap_policy=CustomPolicy(lambda module: module in chosen),
            device_id=place.device,
            use_orig_params=True,
            **keywords,
        )
    return Built(model, job.optimizer(model))


def ddp(spec: Spec, job: Job, units: Iterable[Unit], place: Place) -> Built:
    """``DistributedDataParallel``: the whole model on every rank."""
    del spec, units
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(job.model.to(place.device), gradient_as_bucket_view=True)
    return Built(model, job.optimizer(model))


def single(spec: Spec, job: Job, units: Iterable[Unit], place: Place) -> Built:
    """The model as it is, which is given the batches of all ranks."""
    del spec, units
    model = job.model.to(place.device)
    return Built(model, job.optimizer(model), lambda: 0)
