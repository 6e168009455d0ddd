"""Experts on an axis of their own, against one process that has all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.checkpoint import checkpoint

from polyshard import Plugin, clip_grad_norm_, describe, fully_shard, hookimpl, stats
from polyshard.errors import MeshError, PlanMismatchError, SettingError
from polyshard.plugins.seams import Observer, local_of
from polyshard_tensor_parallel import ExpertParallel, TensorParallel
from polyshard_testing import raises_in_step, ranks

WIDTH, TOKENS, STEPS = 6, 7, 3


class Experts(nn.Module):
    """As transformers has them; without anything in autograd if no token comes."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, 9, WIDTH) / 3)
        self.up_bias = nn.Parameter(torch.randn(count, 9) / 3)
        self.down = nn.Parameter(torch.randn(count, WIDTH, 9) / 3)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == expert)
            inner = F.silu(F.linear(hidden_states[token], self.up[expert], self.up_bias[expert]))
            made = F.linear(inner, self.down[expert])
            out = out.index_add(0, token, made * top_k_weights[token, place, None])
        return out


class Block(nn.Module):
    """A router, and experts; ``only`` are those that may be chosen."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, count)
        self.experts = Experts(count)

    def forward(self, x: Tensor, only: Tensor) -> Tensor:
        hidden = self.norm(x)
        scores = self.gate(hidden).masked_fill(~only, -torch.inf).softmax(-1)
        weights, index = scores.topk(2, dim=-1)
        out: Tensor = x + self.experts(hidden, index, weights)
        return out


class Mixture(nn.Module):
    """Two blocks."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(count) for _ in range(2))
        self.recompute = False

    def forward(self, x: Tensor, only: Tensor) -> Tensor:
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, only, use_reentrant=False)
            else:
                x = block(x, only)
        return x


def mesh_of(efsdp: int, ep: int) -> DeviceMesh:
    device = torch.get_default_device().type
    return init_device_mesh(device, (efsdp, ep), mesh_dim_names=("efsdp", "ep"))


def divided(model: Any, sparse: DeviceMesh, **keywords: Any) -> Any:
    """Experts over ``ep``, a unit a block."""
    experts = ExpertParallel(sparse["ep"], sparse["efsdp"])
    names = experts.apply(model, "blocks.*.experts")
    assert names == ("blocks.0.experts", "blocks.1.experts")
    for block in model.blocks:
        fully_shard(block, shard_placement_fn=experts.placement, **keywords)
    return fully_shard(model, **keywords)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(40 * step + rank))


def allowed(kind: str, step: int, rank: int, count: int) -> Tensor:
    """Experts that tokens of ``rank`` may choose in ``step``."""
    if kind == "any":
        return torch.ones(count, dtype=torch.bool)
    first = [0, 0, count - 2, count - 2][rank] if step != 1 else 0
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[first : first + 2] = True
    return chosen


def full(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, foreach=False)


def check_against_one_process(
    model: Any, rank: int, size: int, count: int, kind: str, micro: int = 1
) -> None:
    alone = Mixture(count)
    optimizers = [sgd(model), sgd(alone)]
    for step in range(STEPS):
        for part in range(micro):
            if micro > 1:
                model.set_requires_gradient_sync(part == micro - 1)
            given = micro * step + part
            out = model(batch(given, rank), allowed(kind, step, rank, count))
            (out.square().mean() / micro).backward()
            for other in range(size):
                whole = alone(batch(given, other), allowed(kind, step, other, count))
                if other == rank:
                    torch.testing.assert_close(out, whole)
                (whole.square().mean() / size / micro).backward()
        norms = [clip_grad_norm_(m.parameters(), 0.5) for m in (model, alone)]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.named_parameters():
        expected = alone.get_parameter(name).detach()
        torch.testing.assert_close(full(value.detach()), expected, msg=name)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["any", "few"])
@pytest.mark.parametrize("count", [4, 5, 8], ids="{} experts".format)
@ranks(2)
def test_two_ranks_are_one_process(rank: int, size: int, count: int, kind: str) -> None:
    check_against_one_process(divided(Mixture(count), mesh_of(1, 2)), rank, size, count, kind)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", ["any", "few"])
@pytest.mark.parametrize("count", [3, 5, 8], ids="{} experts".format)
@pytest.mark.parametrize("ep", [2, 4])
@ranks(4)
def test_four_ranks_are_one_process(rank: int, size: int, ep: int, count: int, kind: str) -> None:
    """Uneven experts, ranks without any, and experts that tokens of some ranks alone reach."""
    model = divided(Mixture(count), mesh_of(size // ep, ep))
    check_against_one_process(model, rank, size, count, kind)


@pytest.mark.parametrize("how", ["recompute", "accumulate", "kept"])
@ranks(4)
def test_other_ways_to_step(rank: int, size: int, how: str) -> None:
    keywords: dict[str, Any] = {"reshard_after_forward": False} if how == "kept" else {}
    model = divided(Mixture(5), mesh_of(2, 2), **keywords)
    model.recompute = how == "recompute"
    micro = 2 if how == "accumulate" else 1
    check_against_one_process(model, rank, size, 5, "few", micro)


@ranks(4)
def test_replicas_of_experts(rank: int, size: int) -> None:
    device = torch.get_default_device().type
    mesh = init_device_mesh(device, (2, 1, 2), mesh_dim_names=("replicas", "efsdp", "ep"))
    model: Any = Mixture(5)
    experts = ExpertParallel(mesh["ep"], mesh["replicas", "efsdp"])
    experts.apply(model, "blocks.*.experts")
    for block in model.blocks:
        fully_shard(block, shard_placement_fn=experts.placement)
    check_against_one_process(fully_shard(model), rank, size, 5, "few")


class Order(Plugin, Observer):
    """Writes down when groups start to gather and when they are there."""

    name = "order"

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    @hookimpl
    def polyshard_observer(self) -> Observer:
        return self

    def on_unshard(self, group: str, payload_bytes: int) -> None:
        self.events.append(("start", group))

    def on_unsharded(self, group: str, wait_seconds: float) -> None:
        self.events.append(("ready", group))


@ranks(4)
def test_both_meshes_of_a_block_are_gathered_together(rank: int, size: int) -> None:
    """One unit, two groups: both transfers start before either is waited for."""
    order = Order()
    everyone = init_device_mesh(torch.get_default_device().type, (4,), mesh_dim_names=("dp",))
    model = divided(Mixture(4), mesh_of(2, 2), mesh=everyone, plugins=[order])
    meshes = [f"{everyone.device_type} {axis} (shard)" for axis in ("dp=4", "efsdp=2")]
    assert [group.mesh for group in describe(model).groups] == meshes * 2
    model(batch(0, rank), allowed("any", 0, rank, 4)).sum().backward()
    names = ("blocks.0#0", "blocks.0#1")
    events = [event for event in order.events if event[1] in names]
    assert len(events) == 8, "forward, and backward"
    for turn in (events[:4], events[4:]):
        assert [what for what, _ in turn] == ["start", "start", "ready", "ready"]
        assert {name for _, name in turn[:2]} == {name for _, name in turn[2:]} == set(names)
    for name in names:
        counted = stats(model).groups[name]
        assert counted.gathers == 2
        assert counted.reductions == 1


@ranks(2)
def test_a_copy_dispatches_for_itself(rank: int, size: int) -> None:
    mesh = mesh_of(1, 2)
    model: Any = Mixture(5)
    ExpertParallel(mesh["ep"], mesh["efsdp"]).apply(model, "**.experts")
    other: Any = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other.blocks[0].experts(batch(0, rank), *_all_to(0)).any()
    assert model.blocks[0].experts(batch(0, rank), *_all_to(0)).any()


def _all_to(expert: int) -> tuple[Tensor, Tensor]:
    return torch.full((TOKENS, 1), expert), torch.ones(TOKENS, 1)


@ranks(4)
def test_ranks_with_the_same_experts_compare_them(rank: int, size: int) -> None:
    """A difference among some ranks is told to all."""
    mesh = mesh_of(2, 2)
    model: Any = Mixture(5)
    experts = ExpertParallel(mesh["ep"], mesh["efsdp"])
    experts.apply(model, "blocks.*.experts")
    if rank == 3:
        for block in model.blocks:
            block.experts.up = nn.Parameter(_with_rows(block.experts.up))
    for block in model.blocks:
        fully_shard(block, shard_placement_fn=experts.placement)
    fully_shard(model)
    with raises_in_step(PlanMismatchError, r"experts\.up"):
        model(batch(0, rank), allowed("any", 0, rank, 5))


def _with_rows(parameter: Any) -> DTensor:
    """One expert more than there is, on this rank."""
    local = parameter.detach().to_local()
    return DTensor.from_local(
        torch.cat([local, local[:1]]), parameter.device_mesh, parameter.placements,
        run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


class Unstacked(nn.Module):
    """Experts apart."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 2
        self.up = nn.Parameter(torch.zeros(3, 2))
        self.members = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x


@ranks(2)
def test_what_does_not_fit_is_said_at_once(rank: int, size: int) -> None:
    mesh = mesh_of(1, 2)
    experts = ExpertParallel(mesh["ep"], mesh["efsdp"])
    model = nn.ModuleDict({"experts": Unstacked(), "layer": nn.Linear(2, 2)})
    with pytest.raises(SettingError) as caught:
        experts.apply(model, "experts")
    for words in ("forward of experts takes", "'experts.up' (3, 2)", "'experts.members.0.weight'"):
        assert words in str(caught.value)
    with pytest.raises(SettingError, match="no num_experts"):
        experts.apply(model, "layer")
    with pytest.raises(SettingError, match="no module is called 'expert'; 'experts'"):
        experts.apply(model, "expert")
    mixture = Mixture(2)
    experts.apply(mixture, "**.experts")
    with pytest.raises(SettingError, match="is a DTensor already"):
        experts.apply(mixture, "**.experts")


@ranks(2)
def test_ranks_divide_the_same_modules(rank: int, size: int) -> None:
    mesh = mesh_of(1, 2)
    model = Mixture(4 + rank)
    with pytest.raises(PlanMismatchError, match=r"blocks\.0\.experts\.up"):
        ExpertParallel(mesh["ep"], mesh["efsdp"]).apply(model, "**.experts")
    assert not any(isinstance(p, DTensor) for p in model.parameters())


@ranks(4)
def test_meshes_have_to_fit(rank: int, size: int) -> None:
    mesh = mesh_of(2, 2)
    device = torch.get_default_device().type
    dense = init_device_mesh(device, (2, 2), mesh_dim_names=("tp", "dp"))
    with pytest.raises(MeshError, match="must be 1-D with a named axis"):
        ExpertParallel(mesh, mesh["efsdp"])
    with pytest.raises(MeshError, match="shares ranks"):
        ExpertParallel(mesh["ep"], mesh["ep"])
    with pytest.raises(MeshError, match="are not within the expert axis"):
        ExpertParallel(mesh["ep"], mesh["efsdp"], dense["tp"])


@ranks(2)
def test_synchronizing_leaves_experts_alone(rank: int, size: int) -> None:
    """Their axis has another name than that of tensor parallelism, over the same ranks."""
    kind = torch.get_default_device().type
    dense = init_device_mesh(kind, (1, 2), mesh_dim_names=("dp", "tp"))
    sparse, model = mesh_of(1, 2), Mixture(3)
    styles = {"blocks.*.gate": ColwiseParallel(output_layouts=Replicate())}
    plugin = TensorParallel(styles, mesh=dense["tp"])
    plugin.apply(model)
    ExpertParallel(sparse["ep"], sparse["efsdp"], dense["tp"]).apply(model, "blocks.*.experts")
    before = [p.detach().clone() for p in model.parameters()]
    plugin.synchronize(model)
    for value, kept in zip(model.parameters(), before, strict=True):
        assert torch.equal(local_of(value), local_of(kept))


@ranks(4)
def test_tokens_may_need_no_gradient(rank: int, size: int) -> None:
    """Two ranks have no expert: they take part in the exchanges of backward nevertheless."""
    model: Any = Mixture(2)
    for block in model.blocks:
        block.norm.requires_grad_(False)
    divided(model, mesh_of(1, 4))
    model(batch(0, rank), torch.ones(2, dtype=torch.bool)).square().mean().backward()
    for block in model.blocks:
        assert rank >= 2 or block.experts.down.grad is not None
