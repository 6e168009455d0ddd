"""The engines, each used as its documentation says, behind the few verbs that the cases need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import polyshard


def whole(value: Tensor) -> Tensor:
    """All of a tensor; every rank calls."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().clone()


@dataclass(frozen=True)
class Engine:
    """An engine without units of its own: DDP. The others override what differs."""

    name: str = "DDP"
    has_fully_shard: bool = False

    def shard(self, model: nn.Module, **options: Any) -> Any:
        del options
        return nn.parallel.DistributedDataParallel(model)

    def parameters(self, model: Any) -> dict[str, Tensor]:
        return {n.removeprefix("module."): whole(p) for n, p in model.named_parameters()}

    def gradients(self, model: Any) -> dict[str, Tensor]:
        found = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
        return {n: whole(g) for n, g in found.items() if g is not None}

    def clip(self, model: Any, limit: float) -> Any:
        return nn.utils.clip_grad_norm_(model.parameters(), limit)

    def unsynchronised(self, model: Any) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = model.no_sync()
        return context


@dataclass(frozen=True)
class OldFSDP(Engine):
    """FSDP1 with ``use_orig_params``, one unit a linear or embedding layer."""

    name: str = "FSDP1"

    def shard(self, model: nn.Module, **options: Any) -> Any:
        mesh = options.get("mesh")
        return Fsdp1(
            model,
            auto_wrap_policy=None if hasattr(model, "tied") else ModuleWrapPolicy({nn.Linear}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
            device_mesh=mesh,
            sharding_strategy=None if mesh is None else ShardingStrategy.HYBRID_SHARD,
        )

    def parameters(self, model: Any) -> dict[str, Tensor]:
        with Fsdp1.summon_full_params(model):
            return {_bare(n): p.detach().clone() for n, p in model.named_parameters()}

    def gradients(self, model: Any) -> dict[str, Tensor]:
        with Fsdp1.summon_full_params(model, with_grads=True):
            found = {_bare(n): p.grad for n, p in model.named_parameters()}
            return {n: g.clone() for n, g in found.items() if g is not None}

    def clip(self, model: Any, limit: float) -> Any:
        return model.clip_grad_norm_(limit)


def _bare(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


@dataclass(frozen=True)
class Sharded(Engine):
    """FSDP2 and what has its interface: a unit for each child, and the root."""

    name: str = "FSDP2"
    has_fully_shard: bool = True
    fully_shard: Callable[..., Any] = fsdp2

    def shard(self, model: nn.Module, **options: Any) -> Any:
        if not hasattr(model, "tied"):  # tied parameters belong to one unit
            for child in model.children():
                if any(True for _ in child.parameters()):
                    self.fully_shard(child, **options)
        return self.fully_shard(model, **options)

    @contextmanager
    def unsynchronised(self, model: Any) -> Any:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


@dataclass(frozen=True)
class Polyshard(Sharded):
    """polyshard with its own clipping, and ``SameValues`` where ``checked``."""

    name: str = "polyshard"
    fully_shard: Callable[..., Any] = polyshard.fully_shard
    checked: bool = False

    def shard(self, model: nn.Module, **options: Any) -> Any:
        if self.checked:
            options["plugins"] = [polyshard.SameValues()]
        return super().shard(model, **options)

    def clip(self, model: Any, limit: float) -> Any:
        return polyshard.clip_grad_norm_(model.parameters(), limit)


ENGINES: tuple[Engine, ...] = (
    Polyshard(),
    Polyshard("polyshard + SameValues", checked=True),
    Sharded(),
    OldFSDP(),
    Engine(),
)
NOT_RUN = {
    "FSDP2 of torch 2.15": "needs an environment of its own",
    "accelerate": "no adapter yet",
    "Lightning": "no adapter yet",
    "DeepSpeed": "no adapter yet",
    "Megatron-FSDP": "no adapter yet",
}
