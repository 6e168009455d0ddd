"""The life of units: what is registered when, odd orders of calls, recovery, memory."""

from __future__ import annotations

import copy
import gc
import resource
import weakref
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from toy_meeting import await_all
from toy_models import Model, assert_same_parameters, build, full, loss_of, shard, tokens_for, train
from toy_units import states

from polyshard import FSDPModule, fully_shard, register_fsdp_forward_method, share_comm_ctx
from polyshard.engine.root import units_below
from polyshard.engine.unit import Unit
from polyshard.errors import DeepcopyError, LifecycleError, UnsupportedError
from polyshard.group.group import State
from polyshard_testing import raises_in_step, ranks


def units(model: nn.Module) -> list[Unit]:
    return [unit for _, _, unit in units_below(model)]


def mean_loss(model: nn.Module, step: int, size: int) -> Tensor:
    return sum((loss_of(model, tokens_for(step, r)) for r in range(size)), torch.zeros(())) / size


def assert_gradients(ours: nn.Module, reference: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert (a.grad is None) is (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            torch.testing.assert_close(full(a.grad), b.grad, rtol=1e-3, atol=1e-5, msg=name)


@ranks(2)
def test_registered_forms(rank: int, size: int) -> None:
    model = shard(build(), fully_shard)
    block: Any = model.blocks[0]
    for kind in (FSDPModule, TorchFSDPModule):
        assert isinstance(block, kind)
    assert type(block).__name__ == "FSDPBlock"
    seen: list[bool] = []
    block.up.register_forward_hook(lambda m, a, o: seen.append(isinstance(m.weight, DTensor)))
    loss = loss_of(model, tokens_for(0, rank))
    assert seen == [False]
    assert isinstance(block.up.weight, DTensor), "blocks are freed after forward"
    assert not isinstance(model.head.weight, DTensor), "the root stays"
    loss.backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert states(model) == {State.SHARDED}
    assert type(model.blocks[:2]) is nn.ModuleList


@ranks(2)
def test_several_forwards_and_backwards(rank: int, size: int) -> None:
    ours, reference = shard(build(), fully_shard), build()
    first, second = (loss_of(ours, tokens_for(s, rank)) for s in range(2))
    (first + second).backward()
    (mean_loss(reference, 0, size) + mean_loss(reference, 1, size)).backward()
    assert_gradients(ours, reference)
    first, second = (loss_of(ours, tokens_for(s, rank)) for s in range(2))
    second.backward()
    first.backward()
    (mean_loss(reference, 0, size) + mean_loss(reference, 1, size)).backward()
    assert_gradients(ours, reference)
    third = loss_of(ours, tokens_for(2, rank))
    third.backward(retain_graph=True)
    third.backward()
    (2 * mean_loss(reference, 2, size)).backward()
    assert_gradients(ours, reference)
    assert states(ours) == {State.SHARDED}


class Repeating(nn.Module):
    """Uses one unit three times, in an order that depends on the call, and one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        outputs = []
        for index in order:
            x = torch.tanh(self.layers[index](x))
            outputs.append(x)
        return torch.stack(outputs).sum() if len(outputs) % 2 else outputs[-1].sum()


@ranks(2)
def test_varying_and_repeated_units(rank: int, size: int) -> None:
    torch.manual_seed(2)
    reference = Repeating()
    torch.manual_seed(2)
    ours = Repeating()
    for layer in ours.layers:
        fully_shard(layer)
    fully_shard(ours)
    x = torch.randn(3, 6)
    for order in ([0, 1, 2], [2, 0, 0, 1], [1, 1, 1], [3, 0], [0, 1, 2, 3, 0]):
        ours(x, order).backward()
        reference(x, order).backward()
        assert_gradients(ours, reference)
        ours.zero_grad()
        reference.zero_grad()
        assert states(ours) == {State.SHARDED}


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("mode", ["no_grad", "inference"])
@ranks(2)
def test_forwards_without_grad(rank: int, size: int, mode: str, reshard: bool | None) -> None:
    ours, reference = shard(build(), fully_shard, reshard_after_forward=reshard), build()
    context = torch.no_grad if mode == "no_grad" else torch.inference_mode
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (ours, reference)]
    with context():
        loss_of(ours, tokens_for(9, rank))
    for step in range(3):
        loss_of(ours, tokens_for(step, rank)).backward()
        mean_loss(reference, step, size).backward()
        with context():  # between backward and the optimizer: what stays gathered goes out of date
            a = loss_of(ours, tokens_for(9, 0))
            b = loss_of(reference, tokens_for(9, 0))
        torch.testing.assert_close(a.clone(), b.clone(), rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for unit in units(ours):
        unit.reshard()
    assert_same_parameters(ours, reference, exact=False)


class Failing(nn.Module):
    """Fails on request in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise RuntimeError("asked to fail")
        if self.where == "backward":
            x.register_hook(self._fail)
        return x

    @staticmethod
    def _fail(gradient: Tensor) -> Tensor:
        raise RuntimeError("asked to fail")


@pytest.mark.parametrize("where", ["forward", "backward"])
@ranks(2)
def test_recovery_after_an_exception(rank: int, size: int, where: str) -> None:
    batches = [tokens_for(s, rank) for s in range(3)]
    reference = shard(build(), fully_shard)
    expected = train(reference, batches)
    ours: Any = build()
    failing = Failing()
    ours.blocks[1].norm = nn.Sequential(ours.blocks[1].norm, failing)
    shard(ours, fully_shard)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    losses = []
    for index, tokens in enumerate(batches):
        if index == 1:
            failing.where = where
            with pytest.raises(RuntimeError, match="asked to fail"):
                loss_of(ours, tokens_for(50, rank)).backward()
            failing.where = ""
            ours.reset_iter_state()
            ours.zero_grad()
            assert states(ours) == {State.SHARDED}
        loss = loss_of(ours, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == expected.losses
    with pytest.raises(LifecycleError, match=r"not the root"):
        ours.blocks[0].reset_iter_state()


class Checkpointed(nn.Module):
    """Runs a module under activation checkpointing."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("outside", [True, False], ids=["around unit", "in unit"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
@ranks(2)
def test_activation_checkpointing(rank: int, size: int, reentrant: bool, outside: bool) -> None:
    ours, reference = build(), build()
    for index, block in enumerate(ours.blocks):
        if outside:
            ours.blocks[index] = Checkpointed(fully_shard(block), reentrant)
        else:
            ours.blocks[index] = fully_shard(Checkpointed(block, reentrant))
    fully_shard(ours)
    for step in range(2):
        loss_of(ours, tokens_for(step, rank)).backward()
        mean_loss(reference, step, size).backward()
        assert_gradients(ours, reference)
        assert states(ours) == {State.SHARDED}


class Headed(nn.Module):
    """A trunk whose norm and head form one unit; the head may be called by itself, in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, head: bool) -> Tensor:
        x = self.norm(self.trunk(x))
        if head:
            x = self.head(x)
        return x


@ranks(2)
def test_lists_of_modules(rank: int, size: int) -> None:
    torch.manual_seed(4)
    reference = Headed()
    torch.manual_seed(4)
    ours = Headed()
    fully_shard([ours.norm, ours.head])
    fully_shard(ours)
    x = torch.randn(4, 6)
    for model in (ours, reference):
        model(x, True).sum().backward()
    assert_gradients(ours, reference)
    for model in (ours, reference):
        model.zero_grad()
        hidden = model(x, False)
        detached = hidden.detach().requires_grad_()
        for chunk in detached.chunk(2):
            model.head(chunk).square().sum().backward()
        hidden.backward(detached.grad)
    assert_gradients(ours, reference)
    assert states(ours) == {State.SHARDED}


@ranks(2)
def test_unshard_and_reshard_by_hand(rank: int, size: int) -> None:
    model = shard(build(), fully_shard)
    block: Any = model.blocks[0]
    whole = full(block.up.weight.detach()).clone()
    handle = block.unshard(async_op=True)  # before the first forward
    handle.wait()
    handle.wait()
    assert torch.equal(block.up.weight.detach(), whole)
    block.unshard()
    block.reshard()
    block.reshard()
    assert isinstance(block.up.weight, DTensor)
    block.unshard(async_op=True)  # forward waits by itself
    loss_of(model, tokens_for(0, rank)).backward()
    assert states(model) == {State.SHARDED}


@ranks(2)
def test_prefetch_changes_no_result(rank: int, size: int) -> None:
    batches = [tokens_for(s, rank) for s in range(3)]
    expected = train(shard(build(), fully_shard), batches)
    model = shard(build(), fully_shard)
    blocks: list[Any] = list(model.blocks)
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    blocks[2].set_modules_to_backward_prefetch(blocks[:2])
    blocks[1].set_modules_to_backward_prefetch([blocks[2]])  # useless, and must be harmless
    assert train(model, batches) == expected
    assert states(model) == {State.SHARDED}


@ranks(2)
def test_no_sync_restores_what_was(rank: int, size: int) -> None:
    model: Any = shard(build(), fully_shard)
    model.blocks[0].set_requires_gradient_sync(False)

    def syncs() -> list[bool]:
        return [g.reduces for u in units(model) for g in u.groups]

    before = syncs()
    with model.no_sync():
        assert not any(syncs())
        with pytest.raises(RuntimeError), model.no_sync():
            raise RuntimeError("inside")
        assert not any(syncs())
    assert syncs() == before
    assert before.count(False) == 1


@ranks(2)
def test_is_last_backward(rank: int, size: int) -> None:
    ours: Any = shard(build(), fully_shard)
    reference = build()
    for micro in range(3):
        ours.set_is_last_backward(micro == 2)
        loss_of(ours, tokens_for(micro, rank)).backward()
        mean_loss(reference, micro, size).backward()
    assert_gradients(ours, reference)


class Generating(nn.Linear):
    """Has a second way in."""

    def generate(self, x: Tensor) -> Tensor:
        return self.forward(x) * 2


@ranks(2)
def test_other_forward_methods(rank: int, size: int) -> None:
    plain, model = Generating(3, 3), Generating(3, 3)
    model.load_state_dict(plain.state_dict())
    for name in ("generate", "sample"):  # nothing happens to what is not sharded
        register_fsdp_forward_method(plain, name)
    assert "generate" not in plain.__dict__
    fully_shard(model)
    register_fsdp_forward_method(model, "generate")
    bound: Any = model.generate
    assert bound.__self__ is model
    assert bound.__name__ == "generate"
    x = torch.ones(1, 3)
    torch.testing.assert_close(model.generate(x), plain.generate(x))
    with pytest.raises(ValueError, match="no method 'sample'"):
        register_fsdp_forward_method(model, "sample")


@ranks(2)
def test_methods_that_torchs_function_registers(rank: int, size: int) -> None:
    """Libraries call it by its own name: the Trainer of transformers does, for ``generate``."""
    plain, model = Generating(3, 3), Generating(3, 3)
    model.load_state_dict(plain.state_dict())
    fully_shard(model, reshard_after_forward=True)
    torch_fsdp.register_fsdp_forward_method(model, "generate")
    x = torch.ones(1, 3)
    got = model.generate(x)
    torch.testing.assert_close(got, plain.generate(x))
    assert states(model) == {State.SHARDED}
    got.sum().backward()
    plain.generate(x).sum().backward()
    assert_gradients(model, plain)
    state: Any = model._get_fsdp_state()  # type: ignore[operator]
    assert not hasattr(state, "_fsdp_param_groups")
    with pytest.raises(UnsupportedError, match="_fsdp_param_groups"):
        _ = state._fsdp_param_groups


class Calling(nn.Module):
    """Calls itself, and a method that is registered; interrupts itself once on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.is_interrupted = nn.Linear(3, 3), nn.Linear(3, 3), False

    def embed(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def generate(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.second(self(x))
        return x

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        if depth:
            x = self(x, depth - 1)
        elif self.is_interrupted:
            self.is_interrupted = False
            raise KeyboardInterrupt
        out: Tensor = self.second(self.embed(x))
        return out


@pytest.mark.parametrize("way", ["forward", "generate", "below a root"])
@pytest.mark.parametrize("reshards", [None, True])
@ranks(2)
def test_modules_that_call_themselves_stay_gathered_until_the_last_call(
    rank: int, size: int, reshards: bool | None, way: str
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), Calling()) if way == "below a root" else Calling()
    model: Any = copy.deepcopy(plain)
    calling = model[1] if way == "below a root" else model
    fully_shard(calling, reshard_after_forward=reshards)
    if calling is not model:
        fully_shard(model)
    for name in ("embed", "generate"):
        register_fsdp_forward_method(calling, name)
    x = torch.linspace(-1, 1, 6).view(2, 3)

    def run(module: Any) -> Tensor:
        out: Tensor = module.generate(x) if way == "generate" else module(x)
        return out

    for is_interrupted in (False, True):
        if is_interrupted:  # it ends the calls without a word to hooks
            calling.is_interrupted = True
            with pytest.raises(KeyboardInterrupt):
                run(model)
        with torch.no_grad():
            torch.testing.assert_close(run(model), run(plain))
        assert states(calling) == {State.SHARDED}
        for each in (model, plain):
            each.zero_grad()
            run(each).sum().backward()
        assert_gradients(model, plain)
        assert states(calling) == {State.SHARDED}


@ranks(2)
def test_two_roots(rank: int, size: int) -> None:
    teacher, student = shard(build(1), fully_shard), shard(build(2), fully_shard)
    with torch.no_grad():
        target = teacher(tokens_for(0, rank))
    (student(tokens_for(0, rank)) - target).square().mean().backward()
    reference_teacher, reference = build(1), build(2)
    losses = [
        (reference(tokens_for(0, r)) - reference_teacher(tokens_for(0, r)).detach()).square().mean()
        for r in range(size)
    ]
    (sum(losses, torch.zeros(())) / size).backward()
    assert_gradients(student, reference)
    assert all(p.grad is None for p in teacher.parameters())


@ranks(2)
def test_roots_may_share_memory(rank: int, size: int) -> None:
    teacher, student = shard(build(1), fully_shard), shard(build(2), fully_shard)
    share_comm_ctx([teacher, student])  # type: ignore[list-item]
    expected = train(shard(build(2), fully_shard), [tokens_for(s, rank) for s in range(2)])
    with torch.no_grad():
        loss_of(teacher, tokens_for(0, rank))
    assert train(student, [tokens_for(s, rank) for s in range(2)]) == expected
    assert units(teacher)[0].context.pool is units(student)[0].context.pool
    with pytest.raises(LifecycleError, match="after its first forward"):
        share_comm_ctx([teacher, student])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="share_comm_ctx takes modules"):
        share_comm_ctx([nn.Linear(1, 1)])  # type: ignore[list-item]


@ranks(2)
def test_forward_of_a_part_before_the_root_is_refused(rank: int, size: int) -> None:
    model = shard(build(), fully_shard)
    model.blocks[0](torch.zeros(1, 1, 192))
    with raises_in_step(LifecycleError, r"'blocks.0' already ran forward on its own"):
        model(tokens_for(0, rank))


@ranks(2)
def test_conversion_after_sharding(rank: int, size: int) -> None:
    ours, reference = shard(build(), fully_shard), build()
    ours.to(torch.float64)
    reference.to(torch.float64)
    for step in range(2):
        loss_of(ours, tokens_for(step, rank)).backward()
        mean_loss(reference, step, size).backward()
    assert_gradients(ours, reference)
    assert all(p.dtype == torch.float64 for p in ours.parameters())


@pytest.mark.parametrize("how", ["assign", "to_empty"])
@ranks(2)
def test_meta_initialisation(rank: int, size: int, how: str) -> None:
    reference = build()
    with torch.device("meta"):
        ours: Any = shard(Model(), fully_shard)
    with raises_in_step(LifecycleError, r"meta device.*embedding\.weight"):
        ours(tokens_for(0, rank))
    ours.reset_iter_state()  # on a device the failure ended the communicators
    source = shard(build(), fully_shard)
    if how == "assign":
        ours.load_state_dict(source.state_dict(), assign=True)
    else:
        ours.to_empty(device=torch.get_default_device())
        ours.load_state_dict(source.state_dict())
    loss_of(ours, tokens_for(0, rank)).backward()
    mean_loss(reference, 0, size).backward()
    assert_gradients(ours, reference)


@ranks(1)
def test_deepcopy_is_refused(rank: int, size: int) -> None:
    model = fully_shard(nn.Linear(3, 3))
    with pytest.raises(DeepcopyError, match="cannot be deep-copied"):
        copy.deepcopy(model)


@ranks(2)
def test_memory_is_steady_and_given_back(rank: int, size: int) -> None:
    model = build(width=512, hidden=1024)
    layer = sum(p.nbytes for p in model.blocks[0].parameters())
    shard(model, fully_shard)
    resident = []
    for step in range(24):
        loss_of(model, tokens_for(step, rank)).backward()
        model.zero_grad()
        with open("/proc/self/statm") as statm:
            resident.append(int(statm.read().split()[1]) * resource.getpagesize())
    # Malloc takes from the system and gives back as it likes; a layer lost in each step adds up.
    assert max(resident[16:]) <= max(resident[4:16]) + 4 * layer
    alive = [weakref.ref(unit) for unit in units(model)]
    del model
    gc.collect()
    assert not any(ref() for ref in alive)


@ranks(2)
def test_gradients_that_are_kept_stay_as_they_are(rank: int, size: int) -> None:
    """Later steps do not write to gradients that are kept; others' memory is used again."""
    model = shard(build(), fully_shard)
    loss_of(model, tokens_for(0, rank)).backward()
    kept = [p.grad for p in model.parameters()]
    values = [full(g).clone() for g in kept if g is not None]
    model.zero_grad()
    addresses = []
    for step in range(1, 4):
        loss_of(model, tokens_for(step, rank)).backward()
        weight: Any = model.head.weight
        addresses.append(weight.grad.to_local().data_ptr())
        del weight
        model.zero_grad()
    for gradient, value in zip(kept, values, strict=True):
        assert gradient is not None
        assert torch.equal(full(gradient), value)
    assert len(set(addresses)) == 1


@ranks(2)
def test_double_backward_is_refused(rank: int, size: int) -> None:
    model: Any = fully_shard(nn.Linear(3, 3))
    x = torch.ones(1, 3, requires_grad=True)
    with raises_in_step(UnsupportedError, r"create_graph=True.*cannot be differentiated"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    # a rank that has not come so far would be told that another gave its step up
    await_all("refused", size)
    model.reset_iter_state()
    model(x).sum().backward()
    assert model.weight.grad is not None


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.a(x)
        return {"b": self.b(x), "c": self.c(x)}


@ranks(2)
def test_backward_through_part_of_the_outputs(rank: int, size: int) -> None:
    model: Any = Several()
    for part in (model.a, model.b, model.c):
        fully_shard(part)
    fully_shard(model)
    reference = Several()
    x = torch.full((2, 4), 0.5)
    for key in ("b", "c", "b"):
        for each in (model, reference):
            each.zero_grad()
            each(x)[key].sum().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(full(ours.grad), theirs.grad)
        assert states(model) == {State.SHARDED}
