"""How each combination that is refused comes about; functions that run on ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from small_model import build
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composition_table import FSDP, Cell
from polyshard import CPUOffloadPolicy, describe, fully_shard


def refused(rank: int, size: int, name: str, folder: str) -> tuple[str, str]:
    """Class and message of what is raised."""
    try:
        CASES[name](rank, folder)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", "nothing was raised"


def _both_axes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 64)


# Without plugins ------------------------------------------------------------------------------


def divided_parameters_alone(rank: int, folder: str) -> None:
    mesh, module = _both_axes(), _linear()
    weight = distribute_tensor(module.weight.detach(), mesh["tp"], [Shard(0)])
    module.weight = nn.Parameter(weight)
    fully_shard(module, mesh=mesh["dp"])


def offload_policy_alone(rank: int, folder: str) -> None:
    fully_shard(_linear(), offload_policy=CPUOffloadPolicy(pin_memory=False))


# Offload --------------------------------------------------------------------------------------


def offload_twice(rank: int, folder: str) -> None:
    from polyshard_offload import Offload

    class Another(Offload):
        name = "another"

    fully_shard(_linear(), plugins=[Offload.cpu(), Another(params="host")])


def offload_policy_beside_offload(rank: int, folder: str) -> None:
    from polyshard_offload import Offload

    policy = CPUOffloadPolicy(pin_memory=False)
    fully_shard(_linear(), offload_policy=policy, plugins=[Offload.cpu()])


def gradients_apart(rank: int, folder: str) -> None:
    from polyshard_offload import Offload

    Offload(params="device", grads="host")


def clipping_after_steps(rank: int, folder: str) -> None:
    from polyshard_offload import Offload

    offload = Offload(params="host", step_in_backward=True)
    model: Any = fully_shard(_linear(), plugins=[offload])
    optimizer = offload.wrap(torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 64)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    del optimizer  # it steps in backward for as long as it is held


def steps_without_gradients(rank: int, folder: str) -> None:
    from polyshard_offload import DiskSettings, Offload

    disk = DiskSettings(path=Path(folder))
    Offload(params="host", grads="disk", optimizer="disk", disk=disk, step_in_backward=True)


def closures(rank: int, folder: str) -> None:
    from polyshard_offload import Offload

    offload = Offload.optimizer_only()
    model = fully_shard(_linear(), plugins=[offload])
    offload.wrap(torch.optim.LBFGS(model.parameters()))


def subclass_offloaded(rank: int, folder: str) -> None:
    from polyshard_offload import Offload

    _shard_subclass(Offload.cpu())


def _shard_subclass(plugin: object) -> None:
    tensors = importlib.import_module("toy_tensors")  # beside core's tests
    module = _linear()
    module.weight = nn.Parameter(tensors.Coded(module.weight.detach()))
    fully_shard(module, plugins=[plugin])


# Quantized ------------------------------------------------------------------------------------


def two_codecs(rank: int, folder: str) -> None:
    from polyshard_quantized import QuantizedComm

    class Another(QuantizedComm):
        name = "another"

    fully_shard(_linear(), plugins=[QuantizedComm(), Another()])


def nothing_quantized(rank: int, folder: str) -> None:
    from polyshard_quantized import QuantizedComm

    QuantizedComm(weights=None)


def subclass_quantized(rank: int, folder: str) -> None:
    from polyshard_quantized import QuantizedComm

    _shard_subclass(QuantizedComm())


def one_rank_quantized(rank: int, folder: str) -> None:
    from polyshard_quantized import QuantizedComm

    model: Any = fully_shard(_linear(), plugins=[QuantizedComm()] if rank else [])
    model(torch.ones(2, 64))


# Tensor parallelism ---------------------------------------------------------------------------


def one_mesh_for_both(rank: int, folder: str) -> None:
    from polyshard_tensor_parallel import TensorParallel

    fully_shard(_linear(), plugins=[TensorParallel(mesh=_both_axes()["tp"])])


def block_first(rank: int, folder: str) -> None:
    from polyshard_tensor_parallel import TensorParallel, demo_plan

    mesh = _both_axes()
    model = build(Cell((), FSDP, "fp32", "plain"))
    plugin = TensorParallel(demo_plan(), mesh=mesh["tp"])
    fully_shard(model.blocks[0], mesh=mesh["dp"], plugins=[plugin])


def rows_left_over(rank: int, folder: str) -> None:
    from polyshard_tensor_parallel import TensorParallel, demo_plan

    model = build(Cell((), FSDP, "fp32", "plain"))
    TensorParallel(demo_plan(), mesh=_both_axes()["tp"]).apply(model)


# Whole matrices -------------------------------------------------------------------------------


def _matrices(beside: object, module: nn.Module) -> None:
    from polyshard_optimizers import MatrixOptimizer

    describe(fully_shard(module, plugins=[MatrixOptimizer(torch.optim.Muon), beside]))


def matrices_offloaded(rank: int, folder: str) -> None:
    from polyshard_offload import Offload

    _matrices(Offload.cpu(), _linear())


def matrices_with_quantized_gradients(rank: int, folder: str) -> None:
    from polyshard_quantized import Int8Block, QuantizedComm

    _matrices(QuantizedComm(gradients=Int8Block(64)), _linear())


def matrices_in_reproducible_runs(rank: int, folder: str) -> None:
    from polyshard_reproducible import Reproducible

    _matrices(Reproducible(), _linear())


CASES: dict[str, Callable[[int, str], None]] = {
    case.__name__.replace("_", "-"): case
    for case in (
        divided_parameters_alone,
        offload_policy_alone,
        offload_twice,
        offload_policy_beside_offload,
        gradients_apart,
        clipping_after_steps,
        steps_without_gradients,
        closures,
        subclass_offloaded,
        two_codecs,
        nothing_quantized,
        subclass_quantized,
        one_rank_quantized,
        one_mesh_for_both,
        block_first,
        rows_left_over,
        matrices_offloaded,
        matrices_with_quantized_gradients,
        matrices_in_reproducible_runs,
    )
}
