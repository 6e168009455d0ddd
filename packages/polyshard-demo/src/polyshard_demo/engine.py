"""Which library shards the model: polyshard, torch, or none, as `polyshard compare` uses them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from polyshard_cli import plan
from polyshard_cli.compare.engines.building import build as build_engine
from polyshard_cli.compare.engines.built import Built, Place
from polyshard_cli.compare.engines.spec import Spec
from polyshard_cli.compare.job.job import Job
from polyshard_cli.plan.request.plugins import make_plugins, package_of, settled
from polyshard_demo.model import LanguageModel
from polyshard_demo.settings import Settings

__all__ = ["build", "plugins_of", "reproducible"]

reproducible = partial(package_of, "polyshard_reproducible", "--reproducible")
tensor_parallel = partial(package_of, "polyshard_tensor_parallel", "--tp")


def plugins_of(settings: Settings) -> list[Any]:
    """Fresh plugins that the options ask for; that of ``--reproducible`` is the last.

    That of ``--tp`` needs a mesh: :func:`build` makes it.

    Raises:
        PlanError: naming the option, where a plugin is not installed, or refuses its settings.
    """
    if settings.tp > 1:
        tensor_parallel()
    names, formats, tiers = settings.plugin_names, settings.quantize, settings.offload
    made = make_plugins(plan.Settings(plugins=names, quantize=formats, offload=tiers))
    if slots := settings.reproducible:
        make = reproducible().Reproducible
        made.append(settled(f"--reproducible {slots}", make, slots=slots, seed=settings.seed))
    return made


def build(
    settings: Settings, place: Place, model: LanguageModel, plugins: Sequence[Any] = ()
) -> Built:
    """The model, sharded in place by blocks, and its optimizer.

    ``single`` is the whole model in one process, with which sharded runs are compared.
    """
    axes = ("replicas", "dp")[-len(settings.data_mesh) :]
    shape = (*settings.data_mesh, settings.tp)
    mesh = init_device_mesh(place.device.type, shape, mesh_dim_names=(*axes, "tp"))
    if settings.tp > 1:
        package = tensor_parallel()
        parallel = package.TensorParallel(package.demo_plan(), mesh=mesh["tp"])
        parallel.apply(model)
        plugins = [*plugins, parallel]

    def optimizer(sharded: nn.Module) -> Optimizer:
        made = _adamw(sharded, settings)
        for offload in (one for one in plugins if getattr(one, "name", "") == "offload"):
            made = offload.wrap(made)
        return made

    spec = Spec(
        name=settings.engine,
        kind="fsdp2" if settings.engine == "torch" else settings.engine,
        bf16=settings.bf16,
        keywords={"mesh": mesh[axes], **({"plugins": plugins} if plugins else {})},
    )
    job = Job(model, _unused, _unused, optimizer)
    return build_engine(spec, job, [(block,) for block in model.blocks], place)


def _unused(*_: Any) -> Any:
    """Batches and losses are those of the training loop."""


def _adamw(model: nn.Module, settings: Settings) -> Optimizer:
    """AdamW that decays matrices and leaves vectors alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))
