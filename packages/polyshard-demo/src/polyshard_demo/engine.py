"""Which library shards the model: polyshard, torch, or none, behind one small class."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyshard.clipping import clip_grad_norm_
from polyshard_demo.model import LanguageModel
from polyshard_demo.plugins import make_offload, quantizing_plugin, tensor_parallel_plugin
from polyshard_demo.settings import EngineName, Settings

__all__ = ["Engine", "Wire", "choose_engine"]

MIB = 1 << 20
LIBRARIES = {"polyshard": "polyshard", "torch": "torch.distributed.fsdp"}
"""Both have ``fully_shard`` and ``MixedPrecisionPolicy``, and take the same calls."""


class Wire(NamedTuple):
    """Bytes this rank has put on and taken off the wire since the start."""

    sent: int
    received: int


@dataclass(frozen=True)
class Engine:
    """What the training loop needs from a library: it shards, shows a plan and counts bytes.

    ``single`` is the whole model in one process, with which sharded runs are compared.
    """

    name: EngineName
    device: torch.device
    mesh: DeviceMesh | None = None
    bf16: bool = False
    plugins: tuple[object, ...] = ()
    offload: Any = None
    tensor_parallel: Any = None

    def shard(self, model: LanguageModel) -> LanguageModel:
        """Shard the model in place, block by block and then the rest; return it."""
        if self.mesh is None:
            return model.to(self.device)
        library = import_module(LIBRARIES[self.name])
        keywords: dict[str, Any] = {"mesh": self.mesh}
        if self.tensor_parallel is not None:
            self.tensor_parallel.apply(model)
        if self.name == "polyshard":
            more = (self.offload, self.tensor_parallel)
            keywords["plugins"] = (*self.plugins, *(one for one in more if one is not None))
        if self.bf16:
            keywords["mp_policy"] = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in model.blocks:
            library.fully_shard(block, **keywords)
        library.fully_shard(model, **keywords)
        return model

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer, with its state where a plugin is to keep it."""
        return optimizer if self.offload is None else self.offload.wrap(optimizer)

    def sync_gradients(self, model: Any, enabled: bool) -> None:
        """Whether the next backward reduces gradients over the ranks."""
        if self.mesh is not None:
            model.set_requires_gradient_sync(enabled)

    def plan(self, model: nn.Module) -> str:
        """What each collective will carry, for people."""
        if self.mesh is None:
            size = sum(parameter.nbytes for parameter in model.parameters())
            return f"not sharded: {size / MIB:,.1f} MiB of parameters in one process"
        if self.name == "torch":
            return _torch_plan(model, self.mesh.shape[-1], 2 if self.bf16 else 4)
        from polyshard import describe

        return str(describe(model))

    def wire(self, model: nn.Module) -> Wire | None:
        """Bytes on the wire so far, or None if the library does not count them."""
        if self.name != "polyshard":
            return Wire(0, 0) if self.mesh is None else None
        from polyshard import stats

        counted = stats(model)
        return Wire(counted.bytes_sent, counted.bytes_received)


def choose_engine(settings: Settings, device: torch.device, *more: object) -> Engine:
    """The engine the settings name, with ``more`` plugins; only its own library is imported."""
    if settings.engine == "single":
        return Engine("single", device)
    axes = ("replicas", "dp")[-len(settings.data_mesh) :]
    shape = (*settings.data_mesh, settings.tp)
    whole = init_device_mesh(device.type, shape, mesh_dim_names=(*axes, "tp"))
    plugins: list[object] = [*settings.plugins, *more]
    if settings.quantize:
        plugins.append(quantizing_plugin(settings.quantize))
    return Engine(
        settings.engine,
        device,
        whole[axes],
        settings.bf16,
        tuple(plugins),
        make_offload(settings.offload),
        tensor_parallel_plugin(whole["tp"]) if settings.tp > 1 else None,
    )


def clip_gradients(model: nn.Module, largest: float) -> float:
    """Scale all gradients so that their global norm is at most `largest`; return the norm before.

    It takes gradients on any mesh, so every engine shares this one.
    """
    return float(clip_grad_norm_(model.parameters(), largest))


def _torch_plan(model: nn.Module, world_size: int, element_size: int) -> str:
    """FSDP2 shows no plan; this is the arithmetic of its all-gathers, per unit."""
    from torch.distributed.fsdp import FSDPModule

    modules = list(model.named_modules())
    units = [(name, module) for name, module in modules if issubclass(type(module), FSDPModule)]
    taken: set[nn.Parameter] = set()
    lines = [f"torch FSDP2 over {world_size} ranks; bytes are per rank and all-gather"]
    for name, unit in units[1:] + units[:1]:  # the root comes last: it has what blocks leave
        own = [parameter for parameter in unit.parameters() if parameter not in taken]
        taken.update(own)
        size = sum(-(-parameter.shape[0] // world_size) * parameter[0].numel() for parameter in own)
        lines.append(
            f"  {name or '(root)':<12} {len(own):>3} parameters {size * element_size:>12,}"
        )
    return "\n".join(lines)
