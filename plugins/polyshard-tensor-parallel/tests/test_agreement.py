"""Ranks of the tensor-parallel axis that want different things; plans that forget something."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from toy_models import full
from tp_models import Mlp, meshes, mlp, mlp_plan, problems_of

from polyshard import Plugin, fully_shard, hookimpl
from polyshard.errors import PlanMismatchError, PolyshardError, SettingError
from polyshard.plugins.seams import GroupInfo, StateDictAdapter
from polyshard_tensor_parallel import Heads, Plan, TensorParallel
from polyshard_tensor_parallel.plans.checking import check
from polyshard_testing import World, ranks

OTHER_PLAN: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": ColwiseParallel()}
WRONG_PLAN: dict[str, ParallelStyle] = {"upp": ColwiseParallel(), "down": RowwiseParallel()}


# Different plans ----------------------------------------------------------------------------------


def whole_run(plan: Mapping[str, ParallelStyle] | None, model: nn.Module, mesh: Any) -> None:
    plugin = TensorParallel(plan, mesh=mesh["tp"])
    if plan is not None:
        plugin.apply(model)
    fully_shard(model, mesh=mesh["dp"], plugins=[plugin])
    model(torch.ones(2, 10)).sum().backward()


def refuses(rank: int, size: int, case: str) -> str:
    """Rank 1 differs; every rank learns of it, and the next run is fine."""
    mesh = meshes(2, 2)
    plan, model = mlp_plan(), mlp()
    if rank == 1 and case == "plan":
        plan = OTHER_PLAN
    if rank == 1 and case == "refused":
        plan = WRONG_PLAN
    if rank == 1 and case == "model":
        model = Mlp(10, 24)
    begin = time.monotonic()
    with pytest.raises(PolyshardError) as caught:
        whole_run(plan, model, mesh)
    assert time.monotonic() - begin < 10, "nobody ran into a time-out"
    dist.barrier()  # a rank that starts again at once would be waited for
    whole_run(mlp_plan(), mlp(), mesh)
    return f"{type(caught.value).__name__}: {caught.value}"


DIFFER = r"(?s)PlanMismatchError: ranks planned .*rank 0 \(-\) against ranks \[1\] \(\+\):\n"
QUOTED = r"PlanMismatchError: rank [01] failed while planning: "
CASES = {
    "plan": [DIFFER + "-style 'down': RowwiseParallel"] * 2,
    "refused": [QUOTED + "SettingError: .*'upp'. Did you mean 'up'", "SettingError: .*'upp'"],
    "model": [DIFFER + r"-parameter up\.weight \(12, 10\)"] * 2,
}


@pytest.mark.parametrize("case", CASES)
def test_differences_along_the_model_axis_are_errors_everywhere(world4: World, case: str) -> None:
    found = world4.run(refuses, case)
    for text, pattern in zip(found[:2], CASES[case], strict=True):
        assert re.search(pattern, text, re.DOTALL), text
    for text in found[2:]:
        assert re.search(QUOTED, text), text


class Marked(Plugin):
    """Watches, with a setting that ranks must agree on."""

    name = "marked"

    def __init__(self, mark: str) -> None:
        self.mark = mark

    @hookimpl
    def polyshard_state_dict_adapter(self, group: GroupInfo) -> Any:
        return Adapter(self.mark)


class Adapter(StateDictAdapter):
    name = "adapter"
    settings: str

    def __init__(self, settings: str) -> None:
        self.settings = settings

    def on_save(self, param: Any, value: Any) -> Any:
        return value

    def on_load(self, param: Any, value: Any) -> Any:
        return value


@ranks(4)
def test_ranks_of_both_axes_compare_plans(rank: int, size: int) -> None:
    """Equal plans of tensor parallelism; what differs is seen by the ranks of both axes."""
    mesh = meshes(2, 2)
    tensor_parallel = TensorParallel(mlp_plan(), mesh=mesh["tp"])
    model: Any = mlp()
    tensor_parallel.apply(model)
    marked = Marked("odd" if rank % 2 else "even")  # alike along the data axis
    fully_shard(model, mesh=mesh["dp"], plugins=[tensor_parallel, marked])
    for _ in range(2):
        with pytest.raises(PlanMismatchError, match=r"rank 0 \(-\) against ranks \[1, 3\] \(\+\)"):
            model(torch.ones(2, 10))


@ranks(4)
def test_stages_of_a_pipeline_do_not_compare(rank: int, size: int) -> None:
    """Two pipeline stages with models of their own: only ranks of a stage compare."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("pp", "tp"))
    plan = mlp_plan() if rank < 2 else {"up": ColwiseParallel()}
    model = mlp() if rank < 2 else nn.ModuleDict({"up": nn.Linear(4, 4)})
    TensorParallel(plan, mesh=mesh["tp"]).apply(model)
    three = init_device_mesh(
        torch.get_default_device().type, (2, 1, 2), mesh_dim_names=("pp", "dp", "tp")
    )
    staged: Any = Mlp(10, 12 if rank < 2 else 16)
    plugin = TensorParallel(mlp_plan(), mesh=three["tp"])
    plugin.apply(staged)
    fully_shard(staged, mesh=three["dp"], plugins=[plugin])
    staged(torch.ones(2, 10)).sum().backward()


@ranks(4)
def test_uneven_pieces_are_no_difference(rank: int, size: int) -> None:
    """Pieces of different sizes on the model axis are no difference of plans."""
    mesh = meshes(2, 2)
    model: Any = nn.Linear(4, 5, bias=False)
    torch.manual_seed(0)
    whole = torch.randn(5, 4)
    model.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
    plugin = TensorParallel(mesh=mesh["tp"])
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(1), plugins=[plugin])
    x = DTensor.from_local(torch.ones(2, 4), mesh["tp"], [Replicate()], run_check=False)
    out = model(x)
    assert torch.allclose(full(out), torch.ones(2, 4) @ whole.t())


# Plans that forget something ----------------------------------------------------------------------


class Attention(nn.Module):
    """Grouped queries as many write them: keys repeated to the queries' heads."""

    def __init__(
        self, heads: int = 4, kv_heads: int = 4, width: int = 3, *, norm: bool = False
    ) -> None:
        super().__init__()
        dim = heads * width
        self.head_dim = width
        self.q = nn.Linear(dim, heads * width, bias=False)
        self.k = nn.Linear(dim, kv_heads * width, bias=False)
        self.v = nn.Linear(dim, kv_heads * width, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.norm = nn.RMSNorm(width) if norm else nn.Identity()
        self.gate = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(self.norm(q), k, v)
        mixed: Tensor = self.o(out.transpose(1, 2).flatten(-2)) * self.gate(x).sigmoid()
        return mixed


def plan_for(*columns: str) -> dict[str, ParallelStyle]:
    return {**{name: ColwiseParallel() for name in columns}, "o": RowwiseParallel()}


def test_keys_and_values_left_whole_are_named() -> None:
    text = problems_of(plan_for("q"), Attention())
    assert "'k.weight' (12, 12) is not in the plan" in text
    assert "add 'k' to the plan, with ColwiseParallel()" in text
    assert "'v.weight' (12, 12) is not in the plan" in text
    assert "gate" not in text, "an output that is no head"
    nested = nn.ModuleDict({"block": nn.ModuleDict({"attn": Attention()})})
    inside = {f"block.attn.{name}": style for name, style in plan_for("q", "v").items()}
    text = problems_of(inside, nested)
    assert "'block.attn.k.weight' (12, 12) is not in the plan" in text


def test_fewer_keys_than_ranks_are_named() -> None:
    """Multi-query attention: one head of keys cannot be divided, nor be left out."""
    one = Attention(kv_heads=1)
    text = problems_of(plan_for("q"), one)
    assert "'k.weight' (3, 12) is not in the plan" in text
    assert "one head cannot be divided so" in text
    text = problems_of(plan_for("q", "k", "v"), Attention(heads=8, kv_heads=2, width=4), 4)
    assert "'k.weight' makes 2 heads of 4, which do not divide over 4 ranks" in text
    declared = Plan(plan_for("q"), (Heads("", "head_dim", ("q",)),))
    assert "'k.weight' (3, 12) is not in the plan" in problems_of(declared, one)


def test_norms_of_one_head_are_named() -> None:
    text = problems_of(plan_for("q", "k", "v"), Attention(norm=True))
    assert "'norm.weight' is as wide as a head (3) and not in the plan" in text
    good = {**plan_for("q", "k", "v"), "norm": SequenceParallel(sequence_dim=1)}
    check(Plan(good), Attention(norm=True), 2)


def test_what_is_meant_to_be_whole_may_be() -> None:
    check(Plan(plan_for("q", "k", "v")), Attention(), 2)
    check(Plan(plan_for("q"), whole=("k", "v")), Attention(), 2)
    check(Plan(plan_for("q")), Attention(), 1)
    assert "no module is called 'kk'. Did you mean 'k'?" in problems_of(
        Plan(plan_for("q", "k", "v"), whole=("kk",)), Attention()
    )
    with pytest.raises(SettingError, match="whole takes several patterns"):
        Plan(plan_for("q"), whole="k")  # type: ignore[arg-type]
    check(Plan(mlp_plan()), mlp(), 2)


class Shared(ParallelStyle):
    """A linear layer that every rank holds whole, with the sum of all ranks' gradients."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        for name, value in list(module.named_parameters(recurse=False)):
            made = distribute_tensor(value.detach(), device_mesh, [Replicate()])
            module.register_parameter(name, nn.Parameter(made))

        def enter(_: nn.Module, args: Any) -> Any:
            return tuple(
                DTensor.from_local(a, device_mesh, [Replicate()], run_check=False) for a in args
            )

        def leave(_: nn.Module, args: Any, output: Any) -> Any:
            return output.to_local(grad_placements=[Partial()])

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@ranks(4)
def test_attention_that_is_accepted_is_right(rank: int, size: int, kv_heads: int) -> None:
    """What the check lets through gives the gradients of one process; the rest would not."""
    mesh = meshes(2, 2)
    torch.manual_seed(0)
    model: Any = Attention(kv_heads=kv_heads)
    oracle = Attention(kv_heads=kv_heads)
    oracle.load_state_dict(model.state_dict())
    x = torch.randn(2, 5, 12)
    styles: dict[str, ParallelStyle] = plan_for("q")
    kv = ColwiseParallel if kv_heads % 2 == 0 else Shared
    styles |= {"k": kv(), "v": kv()}
    plugin = TensorParallel(styles, mesh=mesh["tp"])
    plugin.apply(model)
    fully_shard(model, mesh=mesh["dp"], plugins=[plugin])
    model(x).square().mean().backward()
    oracle(x).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad, msg=name)


@ranks(4)
def test_keys_left_whole_get_wrong_gradients(rank: int, size: int) -> None:
    """Why it is refused: with keys left whole the gradient is a part of what it should be."""
    mesh = meshes(2, 2)
    torch.manual_seed(0)
    model: Any = Attention(kv_heads=1)
    oracle = Attention(kv_heads=1)
    oracle.load_state_dict(model.state_dict())
    plugin = TensorParallel(Plan(plan_for("q"), whole=("k", "v")), mesh=mesh["tp"])
    plugin.apply(model)
    fully_shard(model, mesh=mesh["dp"], plugins=[plugin])
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(model(x), oracle(x))
    model(x).square().mean().backward()
    oracle(x).square().mean().backward()
    assert oracle.v.weight.grad is not None
    assert not torch.allclose(full(model.v.weight.grad), oracle.v.weight.grad, rtol=1e-2)


# What applies to nothing --------------------------------------------------------------------------


def test_plans_that_do_nothing_are_refused() -> None:
    text = problems_of({}, mlp())
    assert "the plan has no styles" in text
    assert "such as {'up': ColwiseParallel()}" in text
    text = problems_of({**mlp_plan(), "nrom": SequenceParallel()}, mlp())
    assert "no module is called 'nrom'. Did you mean 'norm'?" in text
    text = problems_of({"model.up": ColwiseParallel()}, mlp())
    assert "no module is called 'model.up'. Did you mean 'up'?" in text


def test_sequence_parallel_is_for_norms() -> None:
    text = problems_of({"up": SequenceParallel()}, mlp())
    assert "'up' is a Linear; SequenceParallel is for norms and dropout" in text
    check(Plan({"norm": SequenceParallel()}), mlp(), 2)


def test_counts_join_the_list() -> None:
    plan = Plan(
        {**plan_for("q", "k", "v"), "oo": RowwiseParallel()},
        (Heads("", counts=("num_headz", "odd")), Heads("", counts=("head_dim",))),
    )
    model: Any = Attention()
    model.num_heads, model.odd = 4, 7
    text = problems_of(plan, model)
    assert "no module is called 'oo'" in text
    assert "'.num_headz' is None" in text
    assert "Did you mean 'num_heads'?" in text
    assert "'.odd' is 7" in text
    assert "'.head_dim' is 3" in text
