"""Parameters that say of which dtype their gradients are (``grad_dtype``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from toy_models import full
from toy_refusals import refused

from polyshard import MixedPrecisionPolicy, Plugin, StorageFactory, describe, fully_shard, hookimpl
from polyshard._torch.newer import grad_dtype_of, release
from polyshard.errors import SettingError, UnsupportedError
from polyshard.plugins.builtin import DeviceStorage
from polyshard.plugins.seams import GroupInfo
from polyshard.sharding.layout import GroupLayout
from polyshard_testing import raises_in_step, ranks

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
TORCH_FOLLOWS = release() >= (2, 15)
ENGINES: list[Any] = [fully_shard, *([torch_fsdp.fully_shard] if TORCH_FOLLOWS else [])]
"""Those that follow grad_dtype."""

POLICIES = {
    "as it is": MixedPrecisionPolicy(),
    "computes in bf16": MixedPrecisionPolicy(BF16),
    "reduces in fp32": MixedPrecisionPolicy(BF16, FP32),
    "reduces in bf16": MixedPrecisionPolicy(reduce_dtype=BF16),
}
SAID: dict[str, dict[str, torch.dtype | None]] = {
    "nothing": {},
    "bf16": {"0.weight": BF16, "0.bias": BF16, "1.weight": BF16, "1.bias": BF16},
    "fp64": {"0.weight": FP64, "0.bias": FP64, "1.weight": FP64, "1.bias": FP64},
    "some bf16": {"0.weight": BF16, "1.bias": BF16},
    "any": {"0.weight": None, "0.bias": None, "1.weight": None, "1.bias": None},
    "some any": {"0.bias": None},
}


def said(what: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    for name, dtype in SAID[what].items():
        model.get_parameter(name).grad_dtype = dtype
    return model


def batch(rank: int, micro: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * micro + rank))


Gradients = dict[str, tuple[torch.dtype, Tensor]]


def trained(function: Callable[..., Any], rank: int, what: str, policy: str) -> list[Gradients]:
    """Gradients of a step, of another that adds to it, and of one in micro-batches."""
    model: Any = said(what)
    function(model, mp_policy=POLICIES[policy])
    seen: list[Gradients] = []

    def note() -> None:
        seen.append({n: (p.grad.dtype, full(p.grad)) for n, p in model.named_parameters()})

    for micro in range(2):
        model(batch(rank, micro)).float().square().sum().backward()
        note()
    model.zero_grad()
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        model(batch(rank, micro)).float().square().sum().backward()
    note()
    return seen


@pytest.mark.skipif(not TORCH_FOLLOWS, reason="torch's engine follows grad_dtype from 2.15 on")
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("what", list(SAID))
@ranks(2)
def test_gradients_are_torchs(rank: int, size: int, what: str, policy: str) -> None:
    """Bitwise, with their dtypes."""
    theirs = trained(torch_fsdp.fully_shard, rank, what, policy)
    ours = trained(fully_shard, rank, what, policy)
    for found, expected in zip(ours, theirs, strict=True):
        for name, (dtype, value) in expected.items():
            assert found[name][0] == dtype, name
            assert torch.equal(found[name][1], value), name


@pytest.mark.parametrize("what", ["bf16", "some bf16", "any"])
@ranks(4)
def test_replicas_and_partial_sums(rank: int, size: int, what: str) -> None:
    """With every torch against one process, with those that follow grad_dtype against torch."""
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    found: list[dict[str, Any]] = []
    for function in ENGINES:
        model: Any = said(what)
        function(model, mesh=mesh)
        for micro in range(2):
            model.set_requires_all_reduce(micro == 1)
            model(batch(rank, micro)).square().sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
    single = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    single.load_state_dict(said(what).state_dict())
    for r in range(size):
        for micro in range(2):
            (single(batch(r, micro)).square().sum() / size).backward()
    for name, parameter in single.named_parameters():
        wanted = SAID[what].get(name, FP32) or FP32
        for gradients in found:
            assert gradients[name].dtype == wanted, name
            value, expected = full(gradients[name]).float(), parameter.grad
            exact = wanted is FP32
            torch.testing.assert_close(
                value, expected, rtol=1e-4 if exact else 2e-2, atol=1e-5 if exact else 1e-1
            )


@pytest.mark.parametrize("what", ["bf16", "some bf16", "fp64"])
@ranks(2)
def test_gradients_are_those_of_one_process(rank: int, size: int, what: str) -> None:
    """On every torch: each rank's gradient has the dtype, and so has their mean."""
    model: Any = fully_shard(said(what))
    model(batch(rank, 0)).square().sum().backward()
    parts: list[dict[str, Any]] = []
    for r in range(size):
        alone = said(what)
        alone(batch(r, 0)).square().sum().backward()
        parts.append({n: p.grad for n, p in alone.named_parameters()})
    for name, parameter in model.named_parameters():
        wanted = SAID[what].get(name, FP32)
        assert parameter.grad.dtype == wanted, name
        mean = (parts[0][name].double() + parts[1][name].double()) / 2
        torch.testing.assert_close(full(parameter.grad).double(), mean.to(wanted).double())


class Wide(torch.autograd.Function):
    """A product whose gradient is wider than the parameter, as kernels may give it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x.float() * weight.float()).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, x.float() * gradients[0]


class Kernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, dtype=BF16))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Wide.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


VALUE = 1.0 + 2.0**-12
"""Not a number of bf16."""


@ranks(2)
def test_wide_gradients_of_kernels_stay_wide(rank: int, size: int) -> None:
    model: Any = Kernel()
    model.weight.grad_dtype = FP32
    fully_shard(model)
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        model(torch.full((6,), VALUE)).backward()
    assert model.weight.dtype == BF16
    assert model.weight.grad.dtype == FP32
    assert torch.equal(full(model.weight.grad), torch.full((6,), 2 * VALUE))


@ranks(2)
def test_gradients_of_any_dtype_are_not_rounded_unasked(rank: int, size: int) -> None:
    model: Any = Kernel()
    model.weight.grad_dtype = None
    fully_shard(model)
    with raises_in_step(SettingError, r"'weight'.*wider than torch.bfloat16.*reduce_dtype"):
        model(torch.full((6,), VALUE)).backward()
    model.reset_iter_state()
    told: Any = Kernel()
    told.weight.grad_dtype = None
    fully_shard(told, mp_policy=MixedPrecisionPolicy(reduce_dtype=FP32))
    told(torch.full((6,), VALUE)).backward()
    assert torch.equal(full(told.weight.grad), torch.full((6,), VALUE))
    assert told.weight.grad.dtype == FP32


@ranks(2)
def test_zeros_of_an_unknown_dtype_are_refused_on_every_rank(rank: int, size: int) -> None:
    for function in ENGINES:
        model: Any = said("some any")
        function(model)
        model.set_reduce_scatter_unused_params(True)
        with raises_in_step(ValueError, r"0\.bias"):
            model(batch(rank, 0)).sum().backward()
        model.reset_iter_state()
    model = fully_shard(said("some any"), mp_policy=MixedPrecisionPolicy(reduce_dtype=FP32))
    model.set_reduce_scatter_unused_params(True)
    model(batch(rank, 0)).sum().backward()


def converted(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """Dtypes of gradients and parameters after a conversion."""
    model: Any = said("some bf16")
    function(model)
    model(torch.ones(2, 6)).sum().backward()
    model.to(FP64)
    return {n: (p.grad.dtype, p.grad_dtype, p.dtype) for n, p in model.named_parameters()}


def loaded(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """The same of parameters that others replaced, after a step."""
    model: Any = said("some bf16")
    function(model)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model(torch.ones(2, 6)).sum().backward()
    return {n: (p.grad.dtype, p.grad_dtype, p.dtype) for n, p in model.named_parameters()}


@pytest.mark.parametrize(("change", "dtype"), [(converted, FP64), (loaded, FP32)])
@ranks(2)
def test_what_is_said_survives(rank: int, size: int, change: Any, dtype: torch.dtype) -> None:
    found = change(fully_shard)
    for name, dtypes in found.items():
        wanted = SAID["some bf16"].get(name, dtype)
        assert dtypes == (wanted, wanted, dtype), name
    if TORCH_FOLLOWS:
        assert change(torch_fsdp.fully_shard) == found


@ranks(2)
def test_training_goes_on_after_a_conversion(rank: int, size: int) -> None:
    """Torch's engine computes with the old dtype's memory here."""
    model: Any = fully_shard(said("some bf16"))
    for dtype in (FP32, FP64):
        model.to(dtype).zero_grad()
        model(torch.ones(2, 6, dtype=dtype)).sum().backward()
        assert model[0].weight.grad.dtype == BF16
        assert model[0].bias.grad.dtype == dtype


@ranks(2)
def test_it_may_be_said_after_sharding(rank: int, size: int) -> None:
    for function in ENGINES:
        model: Any = function(nn.Linear(6, 5))
        model.weight.grad_dtype = BF16
        model(torch.ones(2, 6)).sum().backward()
        assert model.weight.grad.dtype == BF16
        assert model.bias.grad.dtype == FP32


@ranks(2)
def test_plans_show_it(rank: int, size: int) -> None:
    model = fully_shard(said("some bf16"))
    lines = [line for group in describe(model).groups for line in group.lines()]
    assert any("parameter 0.weight" in line and "gradients bfloat16" in line for line in lines)
    assert not any("parameter 0.bias" in line and "gradients" in line for line in lines)


class Keeping(DeviceStorage):
    """Has a place of its own for gradients."""

    def place_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.clone()


class KeepingFactory(StorageFactory):
    name = "keeping"

    def bind(self, group: GroupInfo, layout: GroupLayout) -> Keeping:
        return Keeping()


class KeepingGradients(Plugin):
    name = "keeping"

    @hookimpl
    def polyshard_shard_storage(self, group: GroupInfo) -> KeepingFactory:
        return KeepingFactory()


def with_storage(model: nn.Module, rank: int) -> None:
    fully_shard(model, plugins=[KeepingGradients()])
    model(batch(rank, 0)).sum().backward()


@ranks(2)
def test_storages_take_gradients_of_the_original_dtype(rank: int, size: int) -> None:
    with_storage(said("nothing"), rank)
    refused(
        UnsupportedError, r"original dtype torch.float32 only", with_storage, said("bf16"), rank
    )


@ranks(2)
def test_what_the_installed_torch_says_is_read_from_the_parameter(rank: int, size: int) -> None:
    parameter: Any = nn.Parameter(torch.zeros(2))
    assert grad_dtype_of(parameter) == (False, FP32)
    parameter.grad_dtype = BF16
    assert grad_dtype_of(parameter) == (True, BF16)
    parameter.grad_dtype = None
    assert grad_dtype_of(parameter) == (True, None)
