"""Which library shards the model: polyshard, torch, or none, as `polyshard compare` uses them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from polyshard_cli.compare.engines.building import build as build_engine
from polyshard_cli.compare.engines.built import Built, Place
from polyshard_cli.compare.engines.spec import Spec
from polyshard_cli.compare.job.job import Job
from polyshard_demo.model import LanguageModel
from polyshard_demo.plugins import tensor_parallel_plugin
from polyshard_demo.settings import Settings

__all__ = ["build"]

KINDS = {"torch": "fsdp2"}


def build(
    settings: Settings,
    device: torch.device,
    model: LanguageModel,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *more: object,
) -> Built:
    """The model, sharded in place by blocks, and its optimizer.

    ``single`` is the whole model in one process, with which sharded runs are compared.

    Args:
        settings: of the run.
        device: where to compute.
        model: whole.
        optimizer: what makes one, once the model is sharded.
        more: plugins beside those that the settings name.
    """
    weights, gradients = _formats(settings.quantize)
    spec = Spec(
        name=settings.engine,
        kind=KINDS.get(settings.engine, settings.engine),
        bf16=settings.bf16,
        formats=(weights, gradients),
        offload=_pairs(settings.offload),
        plugins=settings.plugins,
        keywords={} if settings.engine == "single" else _keywords(settings, device, model, more),
    )
    place = Place(dist.get_rank(), dist.get_world_size(), device)
    job = Job(model, _unused, _unused, optimizer)
    return build_engine(spec, job, [(block,) for block in model.blocks], place)


def _unused(*_: Any) -> Any:
    """Batches and losses are those of the training loop."""


def _formats(text: str) -> tuple[str, str]:
    names = [name.strip() for name in text.split(",")]
    return names[0], names[-1]


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    parts = (part.strip().partition("=") for part in text.split(",") if part.strip())
    return tuple((name, value) for name, _, value in parts)


def _keywords(
    settings: Settings, device: torch.device, model: LanguageModel, more: tuple[object, ...]
) -> dict[str, Any]:
    axes = ("replicas", "dp")[-len(settings.data_mesh) :]
    shape = (*settings.data_mesh, settings.tp)
    whole = init_device_mesh(device.type, shape, mesh_dim_names=(*axes, "tp"))
    if settings.tp > 1:
        plugin = tensor_parallel_plugin(whole["tp"])
        plugin.apply(model)
        more = (*more, plugin)
    return {"mesh": whole[axes], **({"plugins": more} if more else {})}
