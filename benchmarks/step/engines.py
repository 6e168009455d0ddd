"""The engines of the benchmark, made as `polyshard compare` makes them; one step of each.

polyshard, torch's FSDP2 and the floor step AdamW with ``foreach``. ``polyshard best`` and ``torch
best`` are the first two with their best optimizer setting: fused, and flat in polyshard where no
plugin steps the optimizer. DDP and FSDP1 are fused too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from benchmarks.harness import language_model, loss_of
from benchmarks.step.case import Case
from benchmarks.step.floor import Floor
from polyshard_cli.compare.engines import building
from polyshard_cli.compare.engines.built import Built, Place, Unit
from polyshard_cli.compare.engines.spec import Spec, parse
from polyshard_cli.compare.job.job import Job
from polyshard_demo.model import LanguageModel

PHASES = ("forward", "backward", "optimizer", "step")
LEARNING_RATE = 1e-3
BEST = " best"
KEPT = "polyshard kept"
"""polyshard in the mode ``keep``, whatever the others do: to be compared with DDP."""
KEPT_BEST = KEPT + BEST
OTHERS = ("ddp", "fsdp1")
KINDS = {KEPT: "polyshard", "torch": "fsdp2"}
OPTIONS = {
    ("polyshard", "keep"): "+keep",
    ("fsdp2", "keep"): "+keep",
    ("polyshard", "hsdp"): "+hsdp=2",
    ("fsdp2", "hsdp"): "+hsdp=2",
    ("polyshard", "quantized"): "+int8",
    ("polyshard", "offload-optimizer"): "+offload-optimizer",
    ("polyshard", "offload-params"): "+offload-params",
    ("fsdp2", "offload-params"): "+offload-params",
}
"""What `polyshard compare` calls modes; torch has none for the others."""


def build_model(case: Case) -> LanguageModel:
    """The same values on every rank and for every engine."""
    hidden = case.width * 11 // 4 // 32 * 32
    return language_model(case.width, case.layers, case.tokens, hidden)


@dataclass(frozen=True)
class Engine:
    """A model and its optimizer; with a floor a plain model between the floor's transfers."""

    model: Any
    optimizer: torch.optim.Optimizer
    micro_batches: int = 1
    floor: Floor | None = None

    def step(self, batch: Tensor) -> tuple[float, dict[str, float]]:
        """One training step: loss, and seconds by phase."""
        begin = time.perf_counter()
        for _ in range(self.micro_batches - 1):
            self.model.set_requires_gradient_sync(False)
            loss_of(self.model, batch).backward()
            self.model.set_requires_gradient_sync(True)
        if self.floor is not None:
            self.floor.gather()
        loss = loss_of(self.model, batch)
        forward = time.perf_counter()
        loss.backward()
        if self.floor is not None:
            self.floor.gather_again_and_reduce()
        backward = time.perf_counter()
        self.optimizer.step()
        # The gradients of the floor's optimizer are its memory.
        (self.optimizer if self.floor is None else self.model).zero_grad()
        end = time.perf_counter()
        values = (forward - begin, backward - forward, end - backward, end - begin)
        return loss.item(), dict(zip(PHASES, values, strict=True))


def build(engine: str, case: Case) -> Engine:
    """``polyshard``, ``torch``, ``floor``, the first two with :data:`BEST`, ``ddp``, ``fsdp1``."""
    if engine == "floor":
        plain = build_model(case).to(getattr(torch, case.dtype))
        floor = Floor(plain, list(plain.blocks), LEARNING_RATE)
        return Engine(plain, floor.optimizer, floor=floor)
    name = engine.removesuffix(BEST)
    kind, is_best = KINDS.get(name, name), name != engine
    mode = "keep" if name == KEPT else case.mode
    options = OPTIONS.get((kind, mode), "") + "+bf16" * (case.dtype == "bfloat16")
    if is_best and kind == "polyshard" and "offload" not in mode:
        options += "+flat"
    model = build_model(case)
    spec = replace(*parse([kind + options], case.ranks), keywords=_keywords(kind, mode, model))
    setting = "fused" if is_best or kind in OTHERS else "foreach"
    made = compared(spec, model, [(block,) for block in model.blocks], **{setting: True})
    return Engine(made.model, made.optimizer, case.micro_batches)


def _keywords(kind: str, mode: str, model: nn.Module) -> dict[str, Any]:
    """What ``fully_shard`` is given that no name of an engine says."""
    if mode == "blocks":
        return {"reshard_after_forward": dist.get_world_size() // 2}
    if mode == "columns":
        return {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}
    if mode != "tensor-parallel":
        return {}
    from torch.distributed.tensor.parallel import parallelize_module

    from polyshard_tensor_parallel import TensorParallel, demo_plan

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    if kind == "fsdp2":
        parallelize_module(model, mesh["tp"], dict(demo_plan().styles))
        return {"mesh": mesh["dp"]}
    plugin = TensorParallel(demo_plan(), mesh=mesh["tp"])
    plugin.apply(model)
    return {"mesh": mesh["dp"], "plugins": [plugin]}


def compared(spec: Spec, model: nn.Module, units: Iterable[Unit], **setting: bool) -> Built:
    """``model`` as `polyshard compare` shards it, with AdamW; on the ranks."""

    def unused(*_: Any) -> Any:
        """Batches and losses are the benchmark's own."""

    def adamw(made: nn.Module) -> torch.optim.Optimizer:
        kind: Any = setting
        return torch.optim.AdamW(_by_mesh(made), lr=LEARNING_RATE, **kind)

    place = Place(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return building.build(spec, Job(model, unused, unused, adamw), units, place)


def _by_mesh(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups for ``foreach``, which cannot mix meshes; mostly there is only one."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def batches(case: Case, count: int) -> list[Tensor]:
    """One batch a step, different on every data rank."""
    rank = dist.get_rank() // 2 if case.mode == "tensor-parallel" else dist.get_rank()
    generator = torch.Generator().manual_seed(1 + rank)
    shape = (1, case.tokens + 1)
    return [torch.randint(0, 256, shape, generator=generator) for _ in range(count)]
