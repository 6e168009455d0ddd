"""Ranks that have gradients of different parameters are told so, before any sum is kept."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from toy_codecs import Codecs
from toy_collectives import ByCollectives
from toy_models import Branches, full

import polyshard
from polyshard import fully_shard
from polyshard.errors import GradientMismatchError
from polyshard_testing import World, ranks

MOMENT = 5.0
"""Seconds; far below the 30 of the tests' time-out."""


PLUGINS: dict[str, list[type[polyshard.Plugin]]] = {
    "native": [],
    "codec": [Codecs],
    "collectives": [ByCollectives],
}


def disagree(rank: int, size: int, shape: tuple[int, ...], plugins: str, case: str) -> str:
    width = 8 if case == "staged" else 200
    mesh = init_device_mesh(
        torch.get_default_device().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )
    model: Any = fully_shard(Branches(width), mesh=mesh, plugins=[p() for p in PLUGINS[plugins]])
    last = rank == size - 1
    uses = {"other": "ac" if last else "ab", "more": "abc" if last else "a"}.get(
        case, "ab" if last else "a"
    )
    x = torch.tensor(1.0 + rank)
    model(x, "abc").backward()
    model.zero_grad()
    begin = time.monotonic()
    with pytest.raises(GradientMismatchError) as caught:
        model(x, uses).backward()
    assert time.monotonic() - begin < MOMENT
    assert all(p.grad is None for p in model.parameters())
    model.reset_iter_state()
    mean = sum(1.0 + r for r in range(size)) / size
    for zeros in (False, True, False):  # both remedies, and the gradients are right
        model.set_reduce_scatter_unused_params(zeros)
        model(x, uses if zeros else "abc").backward()
        if not zeros:
            for parameter in model.parameters():
                torch.testing.assert_close(full(parameter.grad), torch.full((width, width), mean))
        model.zero_grad()
    return str(caught.value)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ["other", "more", "staged"])
@pytest.mark.parametrize("plugins", PLUGINS)
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2), (4, 1)], ids=str)
def test_different_parameters(
    world2: World, world4: World, shape: tuple[int, ...], plugins: str, case: str
) -> None:
    if plugins == "collectives" and shape == (4, 1):
        pytest.skip("no transfers on a shard axis of one rank")
    world = world2 if shape == (2,) else world4
    texts = set(world.run(disagree, shape, plugins, case))
    (text,) = texts  # the same verdict everywhere
    assert "set_reduce_scatter_unused_params(True)" in text
    last = world.size - 1
    others = list(range(last))
    having = {"other": {"b": (others, [last]), "c": ([last], others)}}.get(
        case, {"b": ([last], others)}
    )
    for name, (have, lack) in having.items():
        assert f"'{name}' has one on ranks {have} and none on ranks {lack}" in text
    assert "'a'" not in text


@pytest.mark.parametrize("plugins", PLUGINS)
@ranks(3)
def test_parameters_that_no_rank_uses(rank: int, size: int, plugins: str) -> None:
    """Parameters that no rank uses, changing from step to step, are no error."""
    model: Any = fully_shard(Branches(200), plugins=[p() for p in PLUGINS[plugins]])
    x = torch.tensor(1.0 + rank)
    mean = sum(1.0 + r for r in range(size)) / size
    for uses in ("a", "b", "abc", "bc", "c"):
        model(x, uses).backward()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) is (name in uses)
            if parameter.grad is not None:
                torch.testing.assert_close(full(parameter.grad), torch.full((200, 200), mean))
        model.zero_grad()


class Cut(nn.Module):
    """A unit whose backward a rank may cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, cut: bool) -> Tensor:
        x = self.inner(x)
        out: Tensor = self.outer(x.detach() if cut else x)
        return out


def skip_a_unit(rank: int, size: int) -> str:
    model: Any = Cut()
    fully_shard(model.inner, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    out = model(torch.ones(2, 4), cut=rank == 1)
    begin = time.monotonic()
    with pytest.raises(GradientMismatchError) as caught:
        out.sum().backward()
    assert time.monotonic() - begin < MOMENT
    return str(caught.value)


def test_a_unit_that_one_backward_skips(world2: World) -> None:
    texts = set(world2.run(skip_a_unit))
    (text,) = texts
    assert "'inner.weight' has one on ranks [0] and none on ranks [1]" in text


@ranks(4)
def test_replicas_are_compared_when_they_are_summed(rank: int, size: int) -> None:
    """Replicas may use parameters in different micro-batches, if they add up to the same."""
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    model: Any = fully_shard(Branches(8), mesh=mesh)
    replica = rank // 2
    x = torch.tensor(1.0)
    model.set_requires_all_reduce(False)
    model(x, "ab" if replica == 0 else "ac").backward()
    model.set_requires_all_reduce(True)
    model(x, "ac" if replica == 0 else "ab").backward()
    for name, value in (("a", 2.0), ("b", 1.0), ("c", 1.0)):
        gradient = full(model.get_parameter(name).grad)
        torch.testing.assert_close(gradient, torch.full((8, 8), value))
    model.zero_grad()
    model.set_requires_all_reduce(False)
    model(x, "ab" if replica == 0 else "ac").backward()
    model.set_requires_all_reduce(True)
    with pytest.raises(GradientMismatchError, match=r"'b' has one on ranks \[0, 1\]"):
        model(x, "a").backward()


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1)], ids=str)
@ranks(4)
def test_a_mesh_of_some_ranks(rank: int, size: int, shape: tuple[int, ...]) -> None:
    """No rank waits for processes that are in no mesh, or in another one."""
    chosen = torch.tensor([1, 3], device="cpu").view(shape)
    mesh = DeviceMesh(
        torch.get_default_device().type,
        chosen,
        mesh_dim_names=("replicate", "shard")[-len(shape) :],
    )
    if rank not in chosen:
        return
    model: Any = fully_shard(Branches(200), mesh=mesh)
    model(torch.tensor(float(rank)), "ab").backward()
    for name in "ab":
        torch.testing.assert_close(
            full(model.get_parameter(name).grad), torch.full((200, 200), 2.0)
        )
