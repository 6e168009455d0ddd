"""Which library shards the model: polyshard, torch, or none, behind one small protocol."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyshard.clipping import clip_grad_norm_
from polyshard_demo.model import LanguageModel
from polyshard_demo.plugins import make_offload, quantizing_plugin, tensor_parallel_plugin
from polyshard_demo.settings import Settings

__all__ = ["Engine", "Wire", "choose_engine"]

MIB = 1 << 20


class Wire(NamedTuple):
    """Bytes this rank has put on and taken off the wire since the start."""

    sent: int
    received: int


class Engine(Protocol):
    """What the training loop needs from a sharding library."""

    def shard(self, model: LanguageModel) -> LanguageModel:
        """Shard the model in place, block by block and then the rest; return it."""
        ...

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer, with its state where the library is to keep it."""
        ...

    def sync_gradients(self, model: nn.Module, enabled: bool) -> None:
        """Whether the next backward reduces gradients over the ranks."""
        ...

    def plan(self, model: nn.Module) -> str:
        """What each collective will carry, for people."""
        ...

    def wire(self, model: nn.Module) -> Wire | None:
        """Bytes on the wire so far, or None if the library does not count them."""
        ...


def choose_engine(settings: Settings, device: torch.device, *more: object) -> Engine:
    """The engine the settings name, with ``more`` plugins; only its own library is imported."""
    if settings.engine == "single":
        return SingleEngine(device)
    axes = ("replicas", "dp")[-len(settings.data_mesh) :]
    shape = (*settings.data_mesh, settings.tp)
    whole = init_device_mesh(device.type, shape, mesh_dim_names=(*axes, "tp"))
    mesh = whole[axes]
    if settings.engine == "torch":
        return TorchEngine(mesh, settings.bf16)
    plugins: list[object] = [*settings.plugins, *more]
    if settings.quantize:
        plugins.append(quantizing_plugin(settings.quantize))
    offload = make_offload(settings.offload)
    prepared = tensor_parallel_plugin(whole["tp"]) if settings.tp > 1 else None
    return PolyshardEngine(mesh, settings.bf16, tuple(plugins), offload, prepared)


def clip_gradients(model: nn.Module, largest: float) -> float:
    """Scale all gradients so that their global norm is at most `largest`; return the norm before.

    It takes gradients on any mesh, so every engine shares this one.
    """
    return float(clip_grad_norm_(model.parameters(), largest))


@dataclass(frozen=True)
class SingleEngine:
    """The whole model in one process: the reference the sharded runs are compared with."""

    device: torch.device

    def shard(self, model: LanguageModel) -> LanguageModel:
        return model.to(self.device)

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def sync_gradients(self, model: nn.Module, enabled: bool) -> None:
        pass

    def plan(self, model: nn.Module) -> str:
        size = sum(parameter.nbytes for parameter in model.parameters())
        return f"not sharded: {size / MIB:,.1f} MiB of parameters in one process"

    def wire(self, model: nn.Module) -> Wire | None:
        return Wire(0, 0)


@dataclass(frozen=True)
class TorchEngine:
    """``torch.distributed.fsdp.fully_shard``."""

    mesh: DeviceMesh
    bf16: bool

    def shard(self, model: LanguageModel) -> LanguageModel:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        keywords: dict[str, Any] = {"mesh": self.mesh}
        if self.bf16:
            keywords["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return _shard_bottom_up(model, lambda unit: fully_shard(unit, **keywords))

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def sync_gradients(self, model: nn.Module, enabled: bool) -> None:
        _set_gradient_sync(model, enabled)

    def plan(self, model: nn.Module) -> str:
        return _torch_plan(model, self.mesh.shape[-1], 2 if self.bf16 else 4)

    def wire(self, model: nn.Module) -> Wire | None:
        return None


@dataclass(frozen=True)
class PolyshardEngine:
    """``polyshard.fully_shard``: the same calls, plus plugins, a plan and counted bytes."""

    mesh: DeviceMesh
    bf16: bool
    plugins: tuple[object, ...] = field(default=())
    offload: Any = None
    tensor_parallel: Any = None

    def shard(self, model: LanguageModel) -> LanguageModel:
        from polyshard import MixedPrecisionPolicy, fully_shard

        plugins = self.plugins if self.offload is None else (*self.plugins, self.offload)
        if self.tensor_parallel is not None:
            self.tensor_parallel.apply(model)
            plugins = (*plugins, self.tensor_parallel)
        keywords: dict[str, Any] = {"mesh": self.mesh, "plugins": plugins}
        if self.bf16:
            keywords["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return _shard_bottom_up(model, lambda unit: fully_shard(unit, **keywords))

    def wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer if self.offload is None else self.offload.wrap(optimizer)

    def sync_gradients(self, model: nn.Module, enabled: bool) -> None:
        _set_gradient_sync(model, enabled)

    def plan(self, model: nn.Module) -> str:
        from polyshard import describe

        return str(describe(model))

    def wire(self, model: nn.Module) -> Wire | None:
        from polyshard import stats

        counted = stats(model)
        return Wire(counted.bytes_sent, counted.bytes_received)


def _shard_bottom_up(model: LanguageModel, shard: Callable[[nn.Module], object]) -> LanguageModel:
    for block in model.blocks:
        shard(block)
    shard(model)
    return model


def _set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Both libraries spell it alike on the class they give the root."""
    setter: Callable[[bool], None] = getattr(model, "set_requires_gradient_sync")  # noqa: B009
    setter(enabled)


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
