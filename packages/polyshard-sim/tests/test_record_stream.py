"""A user's side stream copies sharded gradients and parameters, and nothing waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from polyshard import fully_shard
from polyshard_sim.testing import MODES, Mode, run, sim

WIDTH, STEPS = 48, 4


def sharded(size: int) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).to("sim")
    mesh = init_device_mesh("sim", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def late_copy(value: Tensor) -> Tensor:
    """A copy at the end of a chain of kernels, which reads ``value`` last."""
    late = torch.zeros_like(value)
    for _ in range(8):
        late = late * 1
    return late + value


def copied(rank: int, size: int, records: bool, infers: bool) -> bool:
    """Whether gradients were copied rightly in every step."""
    model, side, right = sharded(size), sim().Stream(), True
    for step in range(STEPS):
        model(torch.full((2, WIDTH), float(rank + step), device="sim")).square().sum().backward()
        wanted = [p.grad.to_local().clone() for p in model.parameters()]
        side.wait_stream(sim().current_stream())
        with torch.inference_mode(infers), sim().stream(side):
            gradients = [p.grad.to_local() for p in model.parameters()]
            copies = [late_copy(g) for g in gradients]
            for gradient in gradients:
                if records:
                    gradient.record_stream(side)
        del gradients
        model.zero_grad()
        # Takes the memory of the gradients where it is free.
        taken = [torch.full((n,), 7.0, device="sim") for n in (WIDTH * (WIDTH + 1) // size,) * 6]
        sim().synchronize()
        del taken
        right = right and all(
            torch.equal(a.cpu(), b.cpu()) for a, b in zip(copies, wanted, strict=True)
        )
    return right


def dropped(rank: int, size: int) -> bool:
    """The same with parameters of a model that goes."""
    model, side = sharded(size), sim().Stream()
    parameters = [p.to_local().detach() for p in model.parameters()]
    wanted = [p.cpu() for p in parameters]
    side.wait_stream(sim().current_stream())
    with sim().stream(side):
        copies = [late_copy(p) for p in parameters]
        for parameter in parameters:
            parameter.record_stream(side)
    del model, parameters, parameter
    taken = [torch.full((n,), 7.0, device="sim") for n in (WIDTH * (WIDTH + 1) // size,) * 6]
    sim().synchronize()
    del taken
    return all(torch.equal(a.cpu(), b) for a, b in zip(copies, wanted, strict=True))


def each(rank: int, size: int) -> dict[str, bool]:
    return {
        "recorded": copied(rank, size, True, False),
        "inference": copied(rank, size, True, True),
        "parameters": dropped(rank, size),
        "not recorded": copied(rank, size, False, False),
    }


@pytest.fixture(scope="module")
def found() -> dict[Mode, list[dict[str, bool]]]:
    return {mode: run(each, 2, mode=mode, jitter_us=300, timeout=120.0) for mode in MODES}


@pytest.mark.parametrize("what", ["recorded", "inference", "parameters"])
def test_recorded_streams_are_waited_for(
    found: dict[Mode, list[dict[str, bool]]], what: str
) -> None:
    assert all(rank[what] for ranks in found.values() for rank in ranks), found


def test_without_it_a_copy_reads_what_comes_next(found: dict[Mode, list[dict[str, bool]]]) -> None:
    assert not all(rank["not recorded"] for ranks in found.values() for rank in ranks), found
