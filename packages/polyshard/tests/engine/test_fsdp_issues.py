"""Traps that users of FSDP have fallen into: one test each, against arithmetic or one process.

The threads they come from are named by repository and number.
"""

from __future__ import annotations

import copy
import random
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from toy_models import assert_same_parameters, build, full, loss_of, shard, tokens_for
from toy_units import Tree, states

from polyshard import MixedPrecisionPolicy, describe, fully_shard
from polyshard.errors import PeerError
from polyshard.group.group import State
from polyshard_testing import World, ranks
from polyshard_testing.world import RankError

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SMALL = {"width": 24, "hidden": 30, "layers": 3}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(tokens))
        return out


@ranks(3)
def test_every_row_of_a_tied_uneven_table_is_trained(rank: int, size: int) -> None:
    """pytorch#176076: the last rank's rows of a tied, uneven table went stale."""
    ours, reference = fully_shard(Tied()), Tied()
    tokens = [torch.arange(7).roll(r) for r in range(size)]
    for step in range(2):
        F.cross_entropy(ours(tokens[rank]), tokens[(rank + step) % size]).backward()
        for r in range(size):
            target = tokens[(r + step) % size]
            (F.cross_entropy(reference(tokens[r]), target) / size).backward()
        for model in (ours, reference):
            with torch.no_grad():
                model.table.weight.sub_(model.table.weight.grad)  # type: ignore[arg-type]
                model.table.weight.grad = None
    torch.testing.assert_close(full(ours.table.weight.detach()), reference.table.weight.detach())
    assert ours.head.weight is ours.table.weight


class Tower(nn.Module):
    """A trunk, and a tower that only some ranks run."""

    takes_part = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower: Any = nn.Linear(4, 4)
        self.trunk = nn.Linear(4, 4)

    def forward(self, x: Tensor, with_tower: bool) -> Tensor:
        if with_tower:
            x = self.tower(x)
        elif self.takes_part:
            self.tower.unshard()  # as many gathers as on the ranks that run it
        out: Tensor = self.trunk(x)
        return out


@ranks(2)
def test_a_unit_that_a_rank_skips(rank: int, size: int) -> None:
    """torchtitan#4777: a rank that skips a unit takes part by hand."""
    model: Any = Tower()
    fully_shard(model.tower, reshard_after_forward=False)
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    model.takes_part = True
    reference = Tower()
    x = torch.ones(2, 4)
    for _ in range(2):
        model(x, rank == 0).sum().backward()
        for r in range(size):
            (reference(x, r == 0).sum() / size).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad)
    assert states(model) == {State.SHARDED}


def skipping_without_help(rank: int, size: int) -> None:
    model: Any = Tower()
    fully_shard(model.tower)
    fully_shard(model)
    model(torch.ones(2, 4), rank == 0).sum().backward()


def test_a_unit_skipped_without_a_word_is_an_error_not_a_hang() -> None:
    world = World(2, collective_seconds=8.0)
    try:
        with pytest.raises(
            RankError, match=r"rank 0(?s:.*)(Timed out|timed out|closed|Connection)"
        ):
            world.run(skipping_without_help, timeout=40.0)
    finally:
        world.close()
    assert issubclass(PeerError, RuntimeError)


class Late(nn.Module):
    """``late`` is used on the last micro-batch only, ``never`` not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early = nn.Linear(3, 3, bias=False)
        self.late = nn.Linear(3, 3, bias=False)
        self.never = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor, late: bool) -> Tensor:
        x = self.early(x)
        return self.late(x) if late else x


@pytest.mark.parametrize("zeros", [False, True])
@ranks(2)
def test_a_parameter_first_used_on_the_last_micro_batch(rank: int, size: int, zeros: bool) -> None:
    """pytorch#196996: fresh gradients in bf16 beside accumulated ones in fp32."""
    model: Any = fully_shard(Late(), mp_policy=BF16)
    model.set_reduce_scatter_unused_params(zeros)
    twin = Late().to(torch.bfloat16)
    for micro in range(2):
        x = torch.full((1, 3), 1.0 + micro)
        model.set_requires_gradient_sync(micro == 1)
        model(x, micro == 1).sum().backward()
        twin(x.bfloat16(), micro == 1).sum().backward()
    for name, parameter in model.named_parameters():
        expected = twin.get_parameter(name).grad
        if expected is None:
            assert (parameter.grad is None) is not zeros
            continue
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(full(parameter.grad), expected.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("factor", [2.0, 3.0, 8.0])
@ranks(4)
def test_divide_factors_do_not_depend_on_the_mesh(rank: int, size: int, factor: float) -> None:
    """pytorch#155903, #190745: one divide factor means the same on every mesh, in bf16 too."""
    found = []
    for shape, names in (((4,), ("shard",)), ((2, 2), ("replicate", "shard"))):
        mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=names)
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
            torch.manual_seed(0)
            model: Any = fully_shard(nn.Linear(3, 5), mesh=mesh, mp_policy=policy)
            model.set_gradient_divide_factor(factor)
            model(torch.full((1, 3), float(rank + 1))).sum().backward()
            found.append(full(model.weight.grad))
    expected = torch.full((5, 3), 10.0 / factor)
    for gradient in found:
        torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 2, 5])
@ranks(4)
def test_fewer_rows_than_ranks(rank: int, size: int, rows: int) -> None:
    """pytorch#137342, VeOmni#973: fewer rows than ranks."""
    torch.manual_seed(1)
    reference = nn.Linear(3, rows)
    torch.manual_seed(1)
    model: Any = fully_shard(nn.Linear(3, rows))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(2):
        x = [torch.full((2, 3), float(r + step)) for r in range(size)]
        model(x[rank]).square().sum().backward()
        for part in x:
            (reference(part).square().sum() / size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference, exact=False)
    state = {name: full(value) for name, value in model.state_dict().items()}
    assert state["weight"].shape == (rows, 3)
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8])
@ranks(3)
def test_gathers_keep_every_bit(rank: int, size: int, dtype: torch.dtype) -> None:
    """bitsandbytes#1945: payloads reinterpreted as floats lost the bits of their NaNs."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = patterns.view(dtype) if dtype.itemsize == 2 else patterns.view(dtype).reshape(-1)
    module: Any = nn.Module()
    module.weight = nn.Parameter(values.clone().view(-1, 32), requires_grad=False)
    module.small = nn.Parameter(values[:96].clone().view(3, 32), requires_grad=False)
    module.forward = lambda: (module.weight.detach().clone(), module.small.detach().clone())
    fully_shard(module)
    whole, small = module()
    assert torch.equal(whole.view(torch.uint8), values.view(-1, 32).view(torch.uint8))
    assert torch.equal(small.view(torch.uint8), values[:96].view(3, 32).view(torch.uint8))


class Interleaving:
    """A sharded tree and its one-process twin, driven by dice that all ranks throw alike."""

    def __init__(self, rank: int, size: int, seed: int) -> None:
        self.dice = random.Random(seed)
        self.rank = rank
        self.size = size
        self.model: Any = Tree()
        self.twin = Tree()
        self.pending: list[tuple[Tensor, list[Tensor]]] = []
        self.inputs = [
            torch.randn(2, 6, generator=torch.Generator().manual_seed(r)) for r in range(size)
        ]
        for unit in self.model.units:
            fully_shard(unit, reshard_after_forward=self.dice.random() < 0.5)
        fully_shard(self.model)

    def choose_prefetch(self) -> None:
        units = list(self.model.units)
        for unit in units:
            if self.dice.random() < 0.5:
                unit.set_modules_to_forward_prefetch(self.dice.sample(units, 2))
            if self.dice.random() < 0.5:
                unit.set_modules_to_backward_prefetch(self.dice.sample(units, 2))

    def program(self) -> list[int]:
        return [self.dice.randrange(4) for _ in range(self.dice.randint(1, 5))]

    def forward(self) -> None:
        program = self.program()
        expected = [self.twin(x, program) for x in self.inputs]
        self.pending.append((self.model(self.inputs[self.rank], program), expected))

    def backward(self) -> None:
        if self.pending:
            out, expected = self.pending.pop(self.dice.randrange(len(self.pending)))
            out.square().sum().backward()
            for value in expected:
                (value.square().sum() / self.size).backward()

    def look(self) -> None:
        """A forward without gradients, in training or evaluation mode."""
        program = self.program()
        self.model.train(self.dice.random() < 0.5)
        with torch.inference_mode() if self.dice.random() < 0.5 else torch.no_grad():
            found = self.model(self.inputs[self.rank], program)
        with torch.no_grad():
            expected = self.twin(self.inputs[self.rank], program)
        torch.testing.assert_close(found.clone(), expected)
        self.model.train()


@pytest.mark.parametrize("seed", range(6))
@ranks(2)
def test_random_programs(rank: int, size: int, seed: int) -> None:
    """pytorch#153354, #183702: several forwards, backwards, eval and no-grad in any order."""
    run = Interleaving(rank, size, seed)
    run.choose_prefetch()
    for _ in range(14):
        run.dice.choice([run.forward, run.forward, run.backward, run.look])()
    while run.pending:
        run.backward()
    for ours, theirs in zip(run.model.parameters(), run.twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(full(ours.grad), theirs.grad)
    run.model.reshard()
    assert states(run.model) == {State.SHARDED}


@ranks(2)
def test_chunked_heads(rank: int, size: int) -> None:
    """pytorch#180428, #181218: a head called per chunk keeps nothing gathered afterwards."""
    model: Any = build(**SMALL)
    fully_shard(model.head)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    reference = build(**SMALL)
    outputs: list[weakref.ref[Tensor]] = []
    for each, world in ((model, [rank]), (reference, range(size))):
        for r in world:
            hidden = torch.randn(6, 24, generator=torch.Generator().manual_seed(r))
            for part in hidden.chunk(3):
                out = each.head(part).square().sum() / (size if each is reference else 1)
                out.backward()
                outputs.append(weakref.ref(out))
    del out
    torch.testing.assert_close(full(model.head.weight.grad), reference.head.weight.grad)
    assert states(model.head) == {State.SHARDED}
    assert all(ref() is None for ref in outputs)


class Recomputing(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            out: Tensor = self.inner(x)
        else:
            out = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("outside", [True, False], ids=["around unit", "in unit"])
@ranks(2)
def test_recomputation_has_the_dtype_of_the_forward(rank: int, size: int, outside: bool) -> None:
    """pytorch#150140, #159359: the recomputation ran in another dtype than the forward."""
    found: list[list[Tensor]] = []
    for reentrant in (None, True, False):
        torch.manual_seed(0)
        inner: nn.Module = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))
        if outside:
            model: Any = Recomputing(fully_shard(inner, mp_policy=BF16), reentrant)
        else:
            model = fully_shard(Recomputing(inner, reentrant), mp_policy=BF16)
        model = fully_shard(nn.Sequential(nn.Linear(6, 6), model), mp_policy=BF16)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank), requires_grad=True)
        model(x).float().square().sum().backward()
        assert x.grad is not None
        found.append([x.grad, *(full(p.grad) for p in model.parameters())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@ranks(4)
def test_partial_sums_of_replicas(rank: int, size: int) -> None:
    """pytorch#125484: reduce-scatter every micro-batch, all-reduce the last, equals full sync."""
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    partial, plain = (shard(build(**SMALL), fully_shard, mesh=mesh) for _ in range(2))
    for micro in range(3):
        partial.set_requires_all_reduce(micro == 2)  # type: ignore[operator]
        for model in (partial, plain):
            loss_of(model, tokens_for(micro, rank)).backward()
        if micro < 2:
            assert all(p.grad is None for p in partial.parameters())
    for ours, theirs in zip(partial.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), full(theirs.grad))  # type: ignore[arg-type]


@ranks(2)
def test_optimizer_hooks_run_once_after_accumulation(rank: int, size: int) -> None:
    """torchrec#4268, pytorch#129450: optimizer hooks run once a step, after accumulation."""
    model: Any = fully_shard(nn.Linear(3, 3))
    seen: list[Tensor] = []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(full(p.grad).clone()))
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        model(torch.full((1, 3), float(micro))).sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], torch.full((3, 3), 3.0))


@ranks(2)
def test_names_that_begin_alike(rank: int, size: int) -> None:
    """VeOmni#1043: 'layers.1' is a prefix of 'layers.10'."""
    model = build(width=8, hidden=8, layers=12)
    for index in (1, 10, 11):
        fully_shard(model.blocks[index])
    fully_shard(model)
    plans = {g.name: {p.fqn for p in g.parameters} for g in describe(model).groups}
    own = {name for name, _ in model.named_parameters()}
    for index in (1, 10, 11):
        expected = {n for n in own if n.startswith(f"blocks.{index}.")}
        assert plans[f"blocks.{index}"] == expected
    assert set().union(*plans.values()) == own
    loss_of(model, tokens_for(0, rank)).backward()


@ranks(2)
def test_two_forwards_of_a_checkpointed_parent(rank: int, size: int) -> None:
    """pytorch#187437: activation checkpointing around a unit, and two forwards a backward."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model: Any = copy.deepcopy(plain)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            parameter.copy_(other.fill_(0.1))
    fully_shard(model[0])
    x = torch.full((2, 4), float(rank + 1), requires_grad=True)
    outputs = [checkpoint(model, x, use_reentrant=False) for _ in range(2)]
    (outputs[0] * outputs[1]).sum().backward()
    for r in range(size):
        y = plain(torch.full((2, 4), float(r + 1)))
        ((y * y).sum() / size).backward()
    layer: Any = plain[0]
    assert torch.allclose(full(model[0].weight.grad), layer.weight.grad)


@ranks(2)
def test_a_reshard_setting_that_changes_between_steps(rank: int, size: int) -> None:
    """pytorch#149029: kept for evaluation without gradients, freed for training."""
    plain = nn.Linear(4, 4, bias=False)
    nn.init.constant_(plain.weight, 0.1)
    model: Any = fully_shard(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    for step in range(4):
        model.set_reshard_after_forward(step % 2 == 0)
        with torch.no_grad():
            assert torch.allclose(model(torch.ones(1, 4)), plain(torch.ones(1, 4)))
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            each(torch.ones(1, 4)).square().sum().backward()
            optimizer.step()
