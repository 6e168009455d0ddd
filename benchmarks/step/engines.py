"""The engines of the benchmark; one step of each.

polyshard, torch's FSDP2 and the floor step AdamW with ``foreach``. ``polyshard best`` and ``torch
best`` are the first two with their best optimizer setting: fused, and flat in polyshard where no
plugin steps the optimizer. DDP and FSDP1 (as polyshard compare makes them) are fused too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import language_model, loss_of, sharded
from benchmarks.step.case import Case
from benchmarks.step.floor import Floor
from benchmarks.step.modes import Setup, data_rank, set_up
from benchmarks.step.rows import OTHERS
from polyshard_cli.compare.engines.building import BUILDERS
from polyshard_cli.compare.engines.built import Built, Place, Unit
from polyshard_cli.compare.engines.spec import Spec
from polyshard_cli.compare.job.job import Job
from polyshard_demo.model import LanguageModel

PHASES = ("forward", "backward", "optimizer", "step")
LEARNING_RATE = 1e-3
BEST = " best"
KEPT = "polyshard kept"
"""polyshard in the mode ``keep``, whatever the others do: to be compared with DDP."""


def param_dtype(case: Case) -> torch.dtype | None:
    """Compute dtype, or ``None`` for that of the parameters."""
    return None if case.dtype == "float32" else getattr(torch, case.dtype)


def build_model(case: Case) -> LanguageModel:
    """The same values on every rank and for every engine."""
    hidden = case.width * 11 // 4 // 32 * 32
    return language_model(case.width, case.layers, case.tokens, hidden)


class Sharded:
    """A model sharded by polyshard or torch."""

    def __init__(self, case: Case, engine: str) -> None:
        is_best = engine.endswith(BEST)
        engine = engine.removesuffix(BEST)
        fully_shard, policy = library(engine)
        self.model: Any = build_model(case)
        setup = set_up(engine, case.mode, self.model)
        keywords = dict(setup.keywords)
        if compute := param_dtype(case):
            keywords["mp_policy"] = policy(param_dtype=compute, reduce_dtype=torch.float32)
        self.micro_batches = case.micro_batches
        sharded(self.model, self.model.blocks, fully_shard, **keywords)
        self.optimizer = _optimizer(self.model, setup, engine, is_best=is_best)

    def step(self, batch: Tensor) -> tuple[float, dict[str, float]]:
        """One training step: loss, and seconds by phase."""
        begin = time.perf_counter()
        for _ in range(self.micro_batches - 1):
            self.model.set_requires_gradient_sync(False)
            loss_of(self.model, batch).backward()
            self.model.set_requires_gradient_sync(True)
        return _last_part(self.model, self.optimizer, batch, begin)


def _optimizer(
    model: nn.Module, setup: Setup, engine: str, *, is_best: bool
) -> torch.optim.Optimizer:
    setting: dict[str, Any] = {"fused" if is_best else "foreach": True}
    made = torch.optim.AdamW(_by_mesh(model), lr=LEARNING_RATE, **setting)
    if is_best and engine == "polyshard" and not setup.wraps:
        from polyshard_optimizers import flat

        return flat(made)
    return setup.wrap(made)


class Wrapped:
    """A model wrapped by DDP or FSDP1, as `polyshard compare` does it."""

    def __init__(self, case: Case, engine: str) -> None:
        plain = build_model(case)
        spec = Spec(name=engine, kind=engine, bf16=case.dtype == "bfloat16")
        made = compared(spec, plain, [(block,) for block in plain.blocks], fused=True)
        self.model, self.optimizer = made.model, made.optimizer

    def step(self, batch: Tensor) -> tuple[float, dict[str, float]]:
        return _last_part(self.model, self.optimizer, batch, time.perf_counter())


class Unsharded:
    """The floor, with the same phases."""

    def __init__(self, case: Case) -> None:
        model = build_model(case)
        if compute := param_dtype(case):
            model = model.to(compute)
        self.floor = Floor(model, list(model.blocks), LEARNING_RATE)

    def step(self, batch: Tensor) -> tuple[float, dict[str, float]]:
        begin = time.perf_counter()
        self.floor.gather()
        loss = loss_of(self.floor.model, batch)
        forward = time.perf_counter()
        loss.backward()
        self.floor.gather_again_and_reduce()
        backward = time.perf_counter()
        self.floor.zero_grad()
        self.floor.optimizer.step()
        end = time.perf_counter()
        return loss.item(), _phases(begin, forward, backward, end)


def compared(spec: Spec, model: nn.Module, units: Iterable[Unit], **setting: bool) -> Built:
    """``model`` as `polyshard compare` shards it, with AdamW; on the ranks."""

    def unused(*_: Any) -> Any:
        """Batches and losses are the benchmark's own."""

    def adamw(made: nn.Module) -> torch.optim.Optimizer:
        kind: Any = setting
        return torch.optim.AdamW(made.parameters(), lr=LEARNING_RATE, **kind)

    place = Place(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return BUILDERS[spec.kind](spec, Job(model, unused, unused, adamw), units, place)


def build(engine: str, case: Case) -> Sharded | Unsharded | Wrapped:
    """``polyshard``, ``torch``, ``floor``, the first two with :data:`BEST`, ``ddp``, ``fsdp1``."""
    if engine in OTHERS:
        return Wrapped(case, engine)
    if engine.startswith(KEPT):
        return Sharded(replace(case, mode="keep"), engine.replace(KEPT, "polyshard"))
    return Unsharded(case) if engine == "floor" else Sharded(case, engine)


def batches(case: Case, count: int | None = None) -> list[Tensor]:
    """One batch a step (``case``'s number of steps by default), different on every data rank."""
    generator = torch.Generator().manual_seed(1 + data_rank(case.mode))
    shape = (1, case.tokens + 1)
    number = case.warmup + case.steps if count is None else count
    return [torch.randint(0, 256, shape, generator=generator) for _ in range(number)]


def library(engine: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``fully_shard`` and the class of its mixed-precision policy."""
    if engine == "polyshard":
        import polyshard

        return polyshard.fully_shard, polyshard.MixedPrecisionPolicy
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    return fully_shard, MixedPrecisionPolicy


def _by_mesh(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups for ``foreach``, which cannot mix meshes; mostly there is only one."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def _last_part(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, begin: float
) -> tuple[float, dict[str, float]]:
    """The last micro-batch of a step that began at ``begin``, and the optimizer's."""
    loss = loss_of(model, batch)
    forward = time.perf_counter()
    loss.backward()
    backward = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    end = time.perf_counter()
    return loss.item(), _phases(begin, forward, backward, end)


def _phases(begin: float, forward: float, backward: float, end: float) -> dict[str, float]:
    values = (forward - begin, backward - forward, end - backward, end - begin)
    return dict(zip(PHASES, values, strict=True))
