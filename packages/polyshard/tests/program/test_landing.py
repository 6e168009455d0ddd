"""Gradients that land whole on one rank, against one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from toy_landing import InTurn, Landing
from toy_transforms import Flattening

import polyshard
from polyshard import MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from polyshard.errors import GradientMismatchError, LifecycleError, PluginError, UnsupportedError
from polyshard.plugins.seams import GroupInfo, OwnedParameter
from polyshard_testing import raises_in_step, ranks


def build() -> nn.Sequential:
    """Chunks that travel alone, packed ones, uneven ones, and a rank without rows."""
    torch.manual_seed(0)
    sizes = (7, 9, 300, 300, 1)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def shard(model: nn.Sequential, mesh: DeviceMesh, plugin: Landing, **kwargs: Any) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, mesh=mesh, plugins=[plugin], **kwargs)
    return fully_shard(model, mesh=mesh, plugins=[plugin], **kwargs)


def inputs(rank: int) -> Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(rank))


def reference(size: int) -> nn.Sequential:
    model = build()
    for rank in range(size):
        (model(inputs(rank)).sum() / size).backward()
    return model


MESHES = {"fsdp": (4,), "hsdp": (2, 2), "replicas": (4, 1), "shards": (1, 4)}


@pytest.mark.parametrize("shape", MESHES.values(), ids=list(MESHES))
@ranks(4)
def test_it_lands_whole_and_comes_back_by_rows(
    rank: int, size: int, shape: tuple[int, ...]
) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, shape, mesh_dim_names=("r", "s")[-len(shape) :]
    )
    plugin = Landing()
    model, expected = shard(build(), mesh, plugin), reference(size)
    predicted = polyshard.describe(model).step_bytes
    model(inputs(rank)).sum().backward()
    assert polyshard.stats(model).bytes_sent == predicted
    held = plugin.landing.held
    assert {f"{i}.weight" for i in range(4)} == set(plugin.landing.heard)
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert theirs.grad is not None
        if name not in held:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]
            continue
        owned = held[name]
        assert owned.has_landed()
        assert owned.is_owner == (rank == owned.owner)
        whole = owned.gradient()
        if whole is not None:
            torch.testing.assert_close(whole, theirs.grad)
        rows = owned.scatter(whole, torch.float32)()
        form: Any = ours
        placed = DTensor.from_local(
            rows, form.device_mesh, form.placements, shape=ours.shape, stride=ours.stride()
        )
        torch.testing.assert_close(placed.full_tensor(), theirs.grad)
        again = owned.gather(rows)
        assert (again is not None) == owned.is_owner
        if again is not None and whole is not None:
            assert torch.equal(again, whole)


@ranks(3)
def test_bytes_that_arrive_are_counted(rank: int, size: int) -> None:
    """Rows are gathered once and gradients reduced once: of both, the same bytes travel."""
    uneven = fully_shard(nn.Linear(1024, 65, bias=False))
    uneven(torch.ones(1, 1024)).sum().backward()
    moved = polyshard.stats(uneven)
    assert moved.bytes_received == moved.bytes_sent > 0
    even = fully_shard(nn.Linear(512, 66, bias=False), plugins=[Landing()])
    even(torch.ones(1, 512)).sum().backward()
    moved, whole = polyshard.stats(even), 512 * 66 * 4
    arrived = (size - 1) * whole if rank == 0 else -whole
    assert moved.bytes_received - moved.bytes_sent == arrived


@pytest.mark.parametrize("shape", MESHES.values(), ids=list(MESHES))
@ranks(4)
def test_norms_and_clipping_see_no_difference(rank: int, size: int, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, shape, mesh_dim_names=("r", "s")[-len(shape) :]
    )
    model, expected = shard(build(), mesh, Landing()), reference(size)
    model(inputs(rank)).sum().backward()
    for order in (2.0, 1.0, math.inf):
        norm = clip_grad_norm_(model.parameters(), 0.5, order)
        theirs = nn.utils.clip_grad_norm_(expected.parameters(), 0.5, order)
        torch.testing.assert_close(norm, theirs)
        torchs: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.4, order)
        theirs = nn.utils.clip_grad_norm_(expected.parameters(), 0.4, order)
        torch.testing.assert_close(torchs.full_tensor(), theirs)


@ranks(2)
def test_later_gradients_are_added_to_what_landed(rank: int, size: int) -> None:
    plugin = Landing()
    model = shard(build(), init_device_mesh(torch.get_default_device().type, (size,)), plugin)
    for _ in range(2):
        model(inputs(rank)).sum().backward()
    expected = reference(size)
    weights = [p for p in expected.parameters() if p.ndim == 2]
    for held, theirs in zip(plugin.landing.held.values(), weights, strict=True):
        if (whole := held.gradient()) is not None:
            assert theirs.grad is not None
            torch.testing.assert_close(whole, 2 * theirs.grad)
    owned = plugin.landing.held["2.weight"]
    gradient = owned.parameter.grad
    owned.parameter.grad = torch.zeros_like(owned.parameter)
    assert not owned.has_landed()
    with raises_in_step(LifecycleError, "gradient of rows"):
        model(inputs(rank)).sum().backward()
    model.reset_iter_state()  # type: ignore[operator]
    owned.parameter.grad = gradient


@ranks(2)
def test_sums_are_in_the_reduce_dtype(rank: int, size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plugin = Landing()
    model = shard(
        build(),
        init_device_mesh(torch.get_default_device().type, (size,)),
        plugin,
        mp_policy=policy,
    )
    plain = shard(
        build(),
        init_device_mesh(torch.get_default_device().type, (size,)),
        Landing(),
        mp_policy=policy,
    )
    for each in (model, plain):
        each(inputs(rank)).sum().backward()
    for owned in plugin.landing.held.values():
        if (whole := owned.gradient()) is not None:
            assert whole.dtype is torch.float32
            assert whole.isfinite().all()


@ranks(2)
def test_ranks_with_other_gradients_are_told_before_anything_is_sent(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    model: Any = fully_shard(Choosing(), mesh=mesh, plugins=[Landing()])
    with pytest.raises(GradientMismatchError, match=r"'second' has one on ranks \[1\]"):
        model(both=rank == 1).backward()
    model.reset_iter_state()
    model(both=True).backward()
    assert model.second.grad is not None


class Choosing(nn.Module):
    """Ranks may differ in what they use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))

    def forward(self, both: bool) -> Tensor:
        return self.first.sum() + (self.second.sum() if both else 0.0)


@ranks(2)
def test_what_needs_rows_refuses_it(rank: int, size: int) -> None:
    model = shard(build(), init_device_mesh(torch.get_default_device().type, (size,)), Landing())
    model(inputs(rank)).sum().backward()
    gradient: Any = model[2].weight.grad
    for ask in (gradient.full_tensor, lambda: gradient[0], lambda: gradient @ gradient):
        with pytest.raises(UnsupportedError, match="landed whole on one rank"):
            ask()
    twice = gradient * 2
    with pytest.raises(UnsupportedError, match="landed whole on one rank"):
        twice.full_tensor()
    assert "WholeRows" in repr(gradient.to_local())


class Wrong(Landing):
    name = "wrong"

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.landing.owners = lambda group: answer  # type: ignore[method-assign]


@ranks(2)
def test_owners_that_are_none_are_refused(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    for answer in (None, [0], [0, 2], [-1, None], ["0", None]):
        with pytest.raises(PluginError, match=r"wrong.*owners.* returned .*for each of 2 param"):
            fully_shard(nn.Linear(4, 4), mesh=mesh, plugins=[Wrong(answer)])


class Elsewhere(Landing):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.landing._next = rank


@ranks(2)
def test_ranks_compare_owners(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    model = shard(build(), mesh, Elsewhere(rank))
    with pytest.raises(polyshard.errors.PlanMismatchError, match="gradient whole on rank"):
        model(inputs(rank))


@ranks(2)
def test_what_plugins_make_something_else_of_is_refused(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh, plugins=[Landing(), Flattening()])
    with pytest.raises(UnsupportedError, match=r"plugins flattening change \['weight'\] before"):
        polyshard.describe(model)


class Showing(InTurn):
    """Takes note of what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[list[int]] = []

    def show(self, group: GroupInfo, parameters: Sequence[nn.Parameter]) -> None:
        assert [p.part_shape for p in group.parameters] == [p.shape for p in group.parameters]
        self.shown.append([id(p) for p in parameters])

    def hold(self, group: GroupInfo, parameters: Sequence[OwnedParameter]) -> None:
        super().hold(group, parameters)
        assert {id(one.parameter) for one in parameters} <= set(self.shown[-1])


@ranks(2)
def test_a_landing_is_shown_all_parameters_first(rank: int, size: int) -> None:
    plugin = Landing()
    plugin.landing = Showing()
    model = shard(build(), init_device_mesh(torch.get_default_device().type, (size,)), plugin)
    polyshard.describe(model)
    assert [id(p) for p in model.parameters()] == [
        p for shown in plugin.landing.shown for p in shown
    ]
    model.double()
    polyshard.describe(model)
    assert len(plugin.landing.shown) == 8, "made anew"
