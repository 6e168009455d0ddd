"""What is around FSDP: DTensor, state-dict helpers, conversions, parameters changed by others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import parametrize
from toy_meeting import await_all
from toy_models import Model, assert_same_parameters, build, full, loss_of, shard, tokens_for, train

from polyshard import fully_shard
from polyshard.errors import LifecycleError, ModuleError
from polyshard_testing import raises_in_step, ranks

SMALL = {"width": 24, "hidden": 30, "layers": 2}


@ranks(2)
def test_parameters_are_dtensors_like_any(rank: int, size: int) -> None:
    model: Any = shard(build(**SMALL), fully_shard)
    reference = build(**SMALL)
    weight: Any = model.blocks[0].up.weight
    assert type(weight.data) is DTensor
    first: Any = reference.blocks[0]
    expected = first.up.weight.detach()
    assert torch.equal(weight.full_tensor(), expected)
    other: Any = weight.detach().redistribute(placements=[Shard(1)])
    assert torch.equal(other.to_local(), expected.chunk(size, dim=1)[rank])
    whole: Any = weight.detach().redistribute(placements=[Replicate()])
    assert torch.equal(whole.to_local(), expected)
    assert torch.equal((weight.detach() + other).full_tensor(), 2 * expected)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@ranks(2)
def test_optimizers_of_torch(rank: int, size: int, name: str) -> None:
    model, reference = shard(build(**SMALL), fully_shard), build(**SMALL)
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (model, reference)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in optimizers]
    for step in range(3):
        loss_of(model, tokens_for(step, rank)).backward()
        for r in range(size):
            (loss_of(reference, tokens_for(step, r)) / size).backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference, exact=False)


def trained(seed: int, rank: int) -> tuple[Model, torch.optim.Optimizer]:
    model = shard(build(seed, **SMALL), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, tokens_for(seed, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def values_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """Every tensor of a nested state dict, whole, under its path."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found.update({f"{key}.{k}": v for k, v in values_of(value).items()})
        elif isinstance(value, Tensor):
            found[key] = full(value)
    return found


OPTIONS = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "from rank 0": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
    "sharded on the host": {"cpu_offload": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@ranks(2)
def test_state_dict_helpers(rank: int, size: int, options: dict[str, Any]) -> None:
    """A state taken from one model makes another train on alike."""
    chosen = StateDictOptions(**options)
    model, optimizer = trained(1, rank)
    state: Any
    optimizer_state: Any
    state, optimizer_state = get_state_dict(model, optimizer, options=chosen)
    if options.get("full_state_dict") and options.get("cpu_offload") and rank:
        assert not state
    else:
        values = state.values()
        sharded = all(isinstance(value, DTensor) for value in values)
        assert sharded is not options.get("full_state_dict", False)
    other, other_optimizer = trained(2, rank)
    # One by one: given both at once, torch skips the model on ranks whose state is empty.
    set_model_state_dict(other, state, options=chosen)
    set_optimizer_state_dict(other, other_optimizer, optimizer_state, options=chosen)
    assert_same_parameters(other, model, exact=True)
    expected = values_of(get_optimizer_state_dict(model, optimizer))
    found = values_of(get_optimizer_state_dict(other, other_optimizer))
    assert expected.keys() == found.keys()
    # Where torch leaves step counts depends on its version.
    assert all(torch.equal(expected[key].cpu(), found[key].cpu()) for key in expected)


@ranks(2)
def test_state_dict_helpers_on_parts(rank: int, size: int) -> None:
    """Of a submodule, and not strictly."""
    model, optimizer = trained(1, rank)
    part = get_model_state_dict(model, submodules={model.blocks[0]})
    assert part
    assert all(name.startswith("blocks.0.") for name in part)
    other, _ = trained(2, rank)
    set_model_state_dict(other, part, options=StateDictOptions(strict=False))
    assert torch.equal(
        full(other.blocks[0].up.weight.detach()),  # type: ignore[union-attr,operator]
        full(model.blocks[0].up.weight.detach()),  # type: ignore[union-attr,operator]
    )
    state: Any = get_optimizer_state_dict(model, optimizer)
    set_optimizer_state_dict(model, optimizer, state)


@ranks(2)
def test_swap_tensors(rank: int, size: int) -> None:
    """Conversion by ``swap_tensors``, which exchanges what is inside parameters."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = shard(build(**SMALL), fully_shard)
        held = list(model.parameters())
        model.to(torch.float64)
        assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    reference = build(**SMALL).double()
    loss_of(model, tokens_for(0, rank)).backward()
    for r in range(size):
        (loss_of(reference, tokens_for(0, r)) / size).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert ours.grad.dtype == torch.float64
        torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-5, atol=1e-7)


class Dora(nn.Module):
    """A low-rank update with a magnitude that is computed after sharding, as DoRA does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 4), requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, 4))
        self.up = nn.Parameter(torch.zeros(6, 2))
        self.magnitude = nn.Parameter(torch.empty(6))

    def initialize(self) -> None:
        whole = full(self.weight.detach()) + full(self.up.detach()) @ full(self.down.detach())
        norm = whole.norm(dim=1)
        target: Any = self.magnitude
        with torch.no_grad():
            if isinstance(target, DTensor):
                start = target.device_mesh.get_local_rank() * -(-6 // target.device_mesh.size())
                local = target.to_local()
                local.copy_(norm[start : start + local.numel()])
            else:
                target.copy_(norm)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.up @ self.down
        scale = self.magnitude / weight.detach().norm(dim=1)
        out: Tensor = x @ (weight * scale[:, None]).T
        return out


@ranks(3)
def test_parameters_changed_before_the_first_forward(rank: int, size: int) -> None:
    reference, model = Dora(), Dora()
    fully_shard(model)
    for each in (reference, model):
        each.initialize()
    x = torch.randn(3, 4)
    for each in (reference, model):
        each(x).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(full(ours.grad), theirs.grad, msg=name)  # type: ignore[arg-type]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@ranks(2)
def test_parametrizations(rank: int, size: int) -> None:
    torch.manual_seed(0)
    reference = nn.Linear(4, 4)
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4)
    for each in (reference, model):
        parametrize.register_parametrization(each, "weight", Doubled())
    fully_shard(model)
    x = torch.ones(1, 4)
    for each in (reference, model):
        each(x).sum().backward()
    assert torch.equal(
        full(model.parametrizations.weight.original.grad),
        reference.parametrizations.weight.original.grad,  # type: ignore[union-attr,arg-type]
    )


@ranks(2)
def test_meta_parameters_are_named_and_can_be_filled(rank: int, size: int) -> None:
    with torch.device("meta"):
        model: Any = Model(**SMALL)
    shard(model, fully_shard)
    with raises_in_step(LifecycleError, "meta"):
        model(tokens_for(0, rank))
    model.reset_iter_state()
    model.to_empty(device=torch.get_default_device())
    reference = shard(build(**SMALL), fully_shard)
    model.load_state_dict(reference.state_dict())
    batches = [tokens_for(s, rank) for s in range(2)]
    assert train(model, batches).losses == train(reference, batches).losses


@ranks(2)
def test_functional_call_with_full_parameters_is_refused(rank: int, size: int) -> None:
    model: Any = shard(build(**SMALL), fully_shard)
    whole = {name: full(value) for name, value in model.named_parameters()}
    arguments = (model, whole, (tokens_for(0, rank),))
    await_all("gathered", size)  # the refusal would end this for a rank that is behind
    with raises_in_step(ModuleError, "not a DTensor.*Load sharded values"):
        torch.func.functional_call(*arguments)
    loss_of(model, tokens_for(0, rank)).backward()


@ranks(2)
def test_torchs_memory_tracker_is_refused(rank: int, size: int) -> None:
    """It patches torch's own engine; torch.cuda.memory works with any."""
    model: Any = shard(build(**SMALL), fully_shard)
    tracker = FSDPMemTracker(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(AttributeError, match="sharded by polyshard, not by torch"), tracker:
        model(tokens_for(0, rank))
