"""What a mode of the benchmark means to each engine; where torch has the feature, torch's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

from polyshard_cli.compare.engines.plugins import make_stack
from polyshard_cli.compare.engines.spec import Spec


def _unchanged(optimizer: Optimizer) -> Optimizer:
    return optimizer


@dataclass(frozen=True)
class Setup:
    """Keywords of every ``fully_shard``, and what becomes of the optimizer."""

    keywords: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[[Optimizer], Optimizer] = _unchanged

    @property
    def wraps(self) -> bool:
        """Whether a plugin steps the optimizer."""
        return self.wrap is not _unchanged


def data_rank(mode: str) -> int:
    """Ranks of the same number are given the same batch."""
    return dist.get_rank() // 2 if mode == "tensor-parallel" else dist.get_rank()


def set_up(engine: str, mode: str, model: nn.Module) -> Setup:
    """Prepare ``model`` for ``mode`` on ``engine`` (``polyshard`` or ``torch``); on the ranks."""
    if engine == "polyshard" and mode in STACKS:
        stack = make_stack(STACKS[mode])
        return Setup({"plugins": stack.plugins}, stack.wrap if stack.wraps else _unchanged)
    plugins = {"polyshard": _PLUGINS, "torch": _TORCH}[engine]
    if mode in plugins:
        return plugins[mode](model)
    return Setup(_options(mode))


def _options(mode: str) -> dict[str, Any]:
    """What both engines are given alike; nothing for a mode that is a plugin's alone."""
    if mode == "keep":
        return {"reshard_after_forward": False}
    if mode == "blocks":
        return {"reshard_after_forward": dist.get_world_size() // 2}
    if mode == "hsdp":
        return {"mesh": _mesh("replicate", "shard")}
    if mode == "columns":
        return {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}
    return {}


def _mesh(outer: str, inner: str) -> DeviceMesh:
    """Two axes, of 2 ranks and the rest; the axis of tensor parallelism is the one of 2."""
    rest = dist.get_world_size() // 2
    shape = (rest, 2) if inner == "tp" else (2, rest)
    return init_device_mesh("cpu", shape, mesh_dim_names=(outer, inner))


# --- polyshard's plugins --------------------------------------------------------------------------


STACKS = {
    "quantized": Spec(name="polyshard+int8", kind="polyshard", formats=("int8", "int8")),
    "offload-optimizer": Spec(
        name="polyshard+offload-optimizer", kind="polyshard", offload=(("optimizer", "host"),)
    ),
    "offload-params": Spec(
        name="polyshard+offload-params", kind="polyshard", offload=(("params", "host"),)
    ),
}
"""As polyshard compare makes them."""


def _tensor_parallel(model: nn.Module) -> Setup:
    from polyshard_tensor_parallel import TensorParallel, demo_plan

    mesh = _mesh("dp", "tp")
    plugin = TensorParallel(demo_plan(), mesh=mesh["tp"])
    plugin.apply(model)
    return Setup({"mesh": mesh["dp"], "plugins": [plugin]})


_PLUGINS: dict[str, Callable[[nn.Module], Setup]] = {
    "tensor-parallel": _tensor_parallel,
}

# --- torch's counterparts -------------------------------------------------------------------------


def _torch_offload_params(_: nn.Module) -> Setup:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return Setup({"offload_policy": CPUOffloadPolicy(pin_memory=False)})


def _torch_tensor_parallel(model: nn.Module) -> Setup:
    from torch.distributed.tensor.parallel import parallelize_module

    from polyshard_tensor_parallel import demo_plan

    mesh = _mesh("dp", "tp")
    parallelize_module(model, mesh["tp"], dict(demo_plan().styles))
    return Setup({"mesh": mesh["dp"]})


_TORCH: dict[str, Callable[[nn.Module], Setup]] = {
    "offload-params": _torch_offload_params,
    "tensor-parallel": _torch_tensor_parallel,
}
