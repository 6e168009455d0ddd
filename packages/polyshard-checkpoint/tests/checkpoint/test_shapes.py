"""Schedulers of every kind, and parameters of every form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import lr_scheduler as lrs
from toy_runs import assert_equal, whole

from polyshard import fully_shard
from polyshard_checkpoint import Checkpoints, TrainingState
from polyshard_checkpoint.manifest import Manifest
from polyshard_checkpoint.safetensors import load_safetensors, save_safetensors
from polyshard_testing import World, ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=4), lrs.MultiStepLR(o, [2, 2, 3])], [4]
    ),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.5), lrs.ExponentialLR(o, 0.9)]),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "one cycle": lambda o: lrs.OneCycleLR(o, 0.3, total_steps=20),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.1, 0.3, 3, cycle_momentum=False),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "numpy": lambda o: lrs.LambdaLR(o, lambda step: np.cos(step / 9)),
}


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("done", [0, 3])
@pytest.mark.filterwarnings("ignore")
def test_schedules_go_on(tmp_path: Path, kind: str, done: int) -> None:
    def start() -> tuple[torch.optim.Optimizer, Any, TrainingState]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        scheduler = SCHEDULES[kind](optimizer)
        return optimizer, scheduler, TrainingState(model, [optimizer], {"scheduler": scheduler})

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if kind == "plateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler, state = start()
    rates(optimizer, scheduler, done)
    Checkpoints(tmp_path).save(done, state)
    wanted = rates(optimizer, scheduler, 9)
    optimizer, scheduler, state = start()
    Checkpoints(tmp_path).load(state)
    assert rates(optimizer, scheduler, 9) == wanted


class Odd(nn.Module):
    """Fewer rows than ranks, a single value, none at all, several dtypes, a changing buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in {"one": (1,), "few": (2, 3), "three": (3,), "wide": (5, 4)}.items():
            value = torch.randn(shape, generator=generator)
            setattr(self, name, nn.Parameter(value))
        self.low = nn.Parameter(torch.randn(7, generator=generator).bfloat16())
        self.exact = nn.Parameter(torch.randn(3, generator=generator).double())
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.seen: Tensor
        self.register_buffer("seen", torch.tensor(float(seed)))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        sums = [torch.sin(value.float().sum() * x) for value in self.parameters()]
        return torch.stack(sums).sum()


def odd(seed: int, size: int) -> TrainingState:
    model = Odd(seed)
    fully_shard(model, mesh=init_device_mesh(torch.get_default_device().type, (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return TrainingState(model, [optimizer], random=False)


def odd_steps(state: TrainingState) -> dict[str, Tensor]:
    for step in range(2):
        state.model(torch.tensor(0.5 + step)).backward()
        state.optimizers[0].step()
        state.optimizers[0].zero_grad()
    return {**whole(state.model), "seen": state.model.get_buffer("seen").clone()}


def odd_save(rank: int, size: int, folder: Path) -> None:
    state = odd(0, size)
    odd_steps(state)
    Checkpoints(folder / "run").save(2, state)
    save_safetensors(state.model, folder / "weights")
    wanted = odd_steps(state)
    if rank == 0:
        torch.save(wanted, folder / "wanted.pt")


def odd_load(rank: int, size: int, folder: Path) -> None:
    wanted = torch.load(folder / "wanted.pt", map_location=torch.get_default_device())
    state = odd(1, size)
    Checkpoints(folder / "run").load(state)
    before = whole(state.model)
    for name, value in odd_steps(state).items():
        torch.testing.assert_close(value, wanted[name], msg=name)
    other = odd(2, size)
    load_safetensors(other.model, folder / "weights")
    assert_equal(whole(other.model), before)


@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 1), (2, 4)])
def test_parameters_of_every_form(
    request: pytest.FixtureRequest, tmp_path: Path, before: int, after: int
) -> None:
    old: World = request.getfixturevalue(f"world{before}")
    new: World = request.getfixturevalue(f"world{after}")
    old.run(odd_save, tmp_path)
    new.run(odd_load, tmp_path)


@ranks(2)
def test_checkpoints_may_be_made_before_the_process_group(
    rank: int, size: int, tmp_path: Path
) -> None:
    """Else every rank would believe that it is the only one, and write over the others."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "is_initialized", lambda: False)
        checkpoints = Checkpoints(tmp_path)
    state = odd(0, size)
    path = checkpoints.save(1, state)
    assert Manifest.read(path).world_size == 2
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
