"""Plans: what they mean, what is wrong with them, and what applying them does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
)
from toy_models import full
from tp_models import Mlp, meshes, mlp, mlp_plan, problems_of, tiny, tokens_for

from polyshard import fully_shard
from polyshard.errors import LifecycleError, MeshError, SettingError
from polyshard_tensor_parallel import Heads, Plan, TensorParallel, demo_plan
from polyshard_tensor_parallel.plans.checking import check
from polyshard_tensor_parallel.plans.matching import matches
from polyshard_testing import World, ranks


def names(*given: str) -> dict[str, nn.Module]:
    return {name: nn.Identity() for name in ("", *given)}


MODULES = names("blocks", "blocks.0", "blocks.0.up", "blocks.1", "blocks.1.up", "head", "blocks.10")


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("blocks.*.up", ["blocks.0.up", "blocks.1.up"]),
        ("blocks.[0]", ["blocks.0"]),
        ("blocks.?", ["blocks.0", "blocks.1"]),
        ("**.up", ["blocks.0.up", "blocks.1.up"]),
        ("blocks.**.up", ["blocks.0.up", "blocks.1.up"]),
        ("head", ["head"]),
        ("", [""]),
        ("*.up", []),
        ("Head", []),
    ],
)
def test_patterns(pattern: str, found: list[str]) -> None:
    assert matches(pattern, MODULES) == found


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("blocks.*.attention.querry", "blocks.*.attention.query"),
        ("block.*.attention.query", "blocks.*.attention.query"),
        ("blocks.0.atention.key", "blocks.0.attention.key"),
        ("haed", "head"),
        ("feed_forward.gate", "**.feed_forward.gate"),
    ],
)
def test_a_wrong_name_is_answered_with_the_one_that_was_meant(wrong: str, meant: str) -> None:
    text = problems_of({wrong: ColwiseParallel()}, tiny())
    assert f"no module is called '{wrong}'. Did you mean '{meant}'?" in text


def test_a_name_like_no_other_lists_where_to_begin() -> None:
    text = problems_of({"zzz": ColwiseParallel()}, tiny())
    assert "names begin with one of: blocks, embedding, head, norm" in text


def test_everything_wrong_is_listed_at_once() -> None:
    plan = {
        "up": ColwiseParallel(),
        "u?": RowwiseParallel(),
        "norm": ColwiseParallel(),
        "dowm": RowwiseParallel(),
    }
    text = problems_of(plan, Mlp(10, 9))
    assert "does not fit Mlp on 2 ranks; nothing was changed" in text
    assert "'up.weight' (9, 10) has 9 on dim 0, which ColwiseParallel divides over 2" in text
    assert "'up' gets ColwiseParallel from 'up' and RowwiseParallel from 'u?'" in text
    assert "'norm' is a LayerNorm; ColwiseParallel takes nn.Linear and nn.Embedding" in text
    assert "Did you mean 'down'?" in text


def test_tied_parameters_must_agree() -> None:
    good = demo_plan()
    check(good, tiny(tied=True), 2)
    wrong = {"embedding": ColwiseParallel(), "head": ColwiseParallel()}
    text = problems_of(wrong, tiny(tied=True))
    assert "'embedding.weight' S(1), 'head.weight' S(0)" in text
    text = problems_of({"embedding": RowwiseParallel()}, tiny(tied=True))
    assert "'head.weight' not in the plan" in text


class Counting(nn.Module):
    """Attention as many write it: heads are counted, not inferred."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.head_dim = width // heads
        self.query = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query(x).view(*x.shape[:-1], self.num_heads, self.head_dim)
        out: Tensor = self.out(heads.flatten(-2))
        return out


def test_heads_must_divide() -> None:
    text = problems_of(demo_plan(), tiny(), world_size=8)
    assert "'blocks.0.attention.query' makes 4 heads of 8, which do not divide over 8" in text
    odd = Plan({"query": ColwiseParallel()}, (Heads("", projections=("query",)),))
    assert "makes 3 heads of 4, which do not divide over 2" in problems_of(odd, Counting(12, 3))
    counted = Plan({"query": ColwiseParallel()}, (Heads("", counts=("num_heads",)),))
    with pytest.raises(SettingError, match=r"num_heads' is 3, which does not divide over 2"):
        check(counted, Counting(12, 3), 2)
    for heads in (Heads("", "nope", ("query",)), Heads("", projections=("nope",))):
        assert "nope" in problems_of(Plan({}, (heads,)), Counting(12, 2))
    with pytest.raises(SettingError, match="nothing to check"):
        Heads("attention")


def test_settings_are_checked() -> None:
    with pytest.raises(SettingError, match="a plan but no mesh"):
        TensorParallel({"up": ColwiseParallel()})
    with pytest.raises(SettingError, match="got 'up': 3"):
        Plan({"up": 3})  # type: ignore[dict-item]
    with pytest.raises(MeshError, match="must be a DeviceMesh"):
        TensorParallel(mesh=3)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="needs a plan and a mesh"):
        TensorParallel().apply(mlp())
    with pytest.raises(SettingError, match="needs a mesh"):
        TensorParallel().synchronize(mlp())


@ranks(4)
def test_applying_reports_and_happens_once(rank: int, size: int) -> None:
    mesh = meshes(2, 2)
    with pytest.raises(SettingError, match="TensorParallel takes a Plan"):
        TensorParallel(3, mesh=mesh["tp"])  # type: ignore[arg-type]
    with pytest.raises(MeshError, match="1-D mesh"):
        TensorParallel(mlp_plan(), mesh=mesh)
    torch.manual_seed(rank)  # ranks need not have drawn the same
    model = Mlp(10, 12)
    plugin = TensorParallel(mlp_plan(), mesh=mesh["tp"])
    report = plugin.apply(model)
    shown = {p.fqn: (p.style, p.placement, p.local_shape) for p in report.parameters}
    assert shown["up.weight"] == ("ColwiseParallel", "S(0)", (6, 10))
    assert shown["down.weight"] == ("RowwiseParallel", "S(1)", (10, 6))
    assert shown["down.bias"] == ("RowwiseParallel", "R", (10,))
    assert report.alike == ("norm.weight", "norm.bias")
    assert "up.weight" in str(report)
    assert "alike on every rank: norm.weight" in str(report)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, model.norm.weight.detach().cpu())
    assert torch.equal(gathered[0], gathered[1])
    with pytest.raises(LifecycleError, match="applied to the Mlp already"):
        plugin.apply(model)
    second = TensorParallel(mlp_plan(), mesh=mesh["tp"])
    with pytest.raises(SettingError, match=r"'up\.weight' and 3 more is a DTensor already"):
        second.apply(model)
    fully_shard(model, mesh=mesh["dp"], plugins=[plugin])
    with pytest.raises(SettingError, match="is a DTensor already"):
        TensorParallel(mlp_plan(), mesh=mesh["tp"]).apply(model)


@ranks(4)
def test_the_plan_is_for_the_whole_model(rank: int, size: int) -> None:
    """fully_shard applies a plan to a whole model, and refuses a part of one."""
    mesh = meshes(2, 2)
    model, plugin = mlp(), TensorParallel(mlp_plan(), mesh=mesh["tp"])
    fully_shard(model, mesh=mesh["dp"], plugins=[plugin])
    assert isinstance(model.up.weight, DTensor)
    assert model.up.weight.device_mesh == mesh
    assert model.norm.weight.device_mesh == mesh  # type: ignore[attr-defined]
    before = tiny()
    late = TensorParallel(demo_plan(), mesh=mesh["tp"])
    with pytest.raises(LifecycleError, match=r"got a Block that .* call apply\(model\)"):
        fully_shard(before.blocks[0], mesh=mesh["dp"], plugins=[late])
    assert not any(isinstance(p, DTensor) for p in before.parameters())


def fails_alike(rank: int, size: int) -> str:
    mesh = meshes(2, 2)
    with pytest.raises(SettingError) as caught:
        TensorParallel({"upp": ColwiseParallel()}, mesh=mesh["tp"]).apply(mlp())
    return str(caught.value)


def test_a_wrong_plan_fails_on_every_rank(world4: World) -> None:
    found = world4.run(fails_alike)
    assert len(set(found)) == 1
    assert "Did you mean 'up'?" in found[0]


@ranks(4)
def test_head_counts_are_adjusted(rank: int, size: int) -> None:
    mesh = meshes(2, 2)
    torch.manual_seed(0)
    model, reference = Counting(12, 2), Counting(12, 2)
    reference.load_state_dict(model.state_dict())
    plan = Plan(
        {"query": ColwiseParallel(), "out": RowwiseParallel()},
        (Heads("", projections=("query",), counts=("num_heads",)),),
    )
    plugin = TensorParallel(plan, mesh=mesh["tp"])
    report = plugin.apply(model)
    assert model.num_heads == 1
    assert report.counts == (".num_heads: 2 -> 1",)
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x), reference(x))


@ranks(4)
def test_ties_survive(rank: int, size: int) -> None:
    mesh = meshes(2, 2)
    model = tiny(tied=True)
    TensorParallel(demo_plan(), mesh=mesh["tp"]).apply(model)
    assert model.head.weight is model.embedding.weight
    replicated: dict[str, ParallelStyle] = {"norm": SequenceParallel(), "up": ColwiseParallel()}
    small = mlp()
    TensorParallel(replicated, mesh=mesh["tp"]).apply(small)
    assert small.norm.weight.placements == (Replicate(),)  # type: ignore[attr-defined]


@ranks(4)
def test_loss_parallel(rank: int, size: int) -> None:
    """Logits stay cut along the vocabulary; the loss and its gradients are those of whole ones."""
    mesh = meshes(2, 2)
    reference, model = tiny(), tiny()
    plugin = TensorParallel(demo_plan(loss_parallel=True), mesh=mesh["tp"])
    plugin.apply(model)
    fully_shard(model, mesh=mesh["dp"], plugins=[plugin])
    tokens = tokens_for(0, 0)
    with loss_parallel():
        logits: Any = model(tokens[:, :-1])
        assert logits.placements == (Shard(2),)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    whole = reference(tokens[:, :-1]).flatten(0, 1)
    expected = nn.functional.cross_entropy(whole, tokens[:, 1:].flatten())
    expected.backward()
    torch.testing.assert_close(full(loss), expected)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-4, atol=1e-6)


@ranks(2)
def test_what_is_frozen_stays_frozen(rank: int, size: int) -> None:
    """torch's SequenceParallel makes its parameters anew, trainable."""
    mesh, model = meshes(1, 2), mlp()
    model.norm.requires_grad_(False)
    model.up.bias.requires_grad_(False)
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(output_layouts=Replicate())}
    TensorParallel(plan, mesh=mesh["tp"]).apply(model)
    assert not any(p.requires_grad for p in model.norm.parameters())
    assert (model.up.weight.requires_grad, model.up.bias.requires_grad) == (True, False)


@ranks(2)
def test_a_module_of_two_names_is_divided_once(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"one": nn.Module(), "two": nn.Module()})
    model["one"].embed = model["two"].embed = nn.Embedding(8, 4)
    whole = model["one"].embed.weight.detach().clone()
    plan = {"**.embed": RowwiseParallel(input_layouts=Replicate())}
    TensorParallel(plan, mesh=meshes(1, 2)["tp"]).apply(model)
    torch.testing.assert_close(model["two"].embed(torch.arange(8)), whole)


def test_styles_do_not_reach_into_modules_of_a_module() -> None:
    model = mlp()
    model.up = nn.utils.parametrizations.weight_norm(model.up)
    text = problems_of({"up": ColwiseParallel()}, model)
    assert "'up' has parameters in modules of its own ('parametrizations.weight" in text
