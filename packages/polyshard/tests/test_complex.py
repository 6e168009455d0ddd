"""Complex parameters: imaginary parts count like real ones, whatever dtypes a policy names."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from toy_models import full
from typing_extensions import override

from polyshard import MixedPrecisionPolicy, fully_shard
from polyshard.transport import collective
from polyshard.transport.base import Extents
from polyshard_testing import ranks

POLICIES = {
    "none": MixedPrecisionPolicy(),
    "bf16 / fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "fp32 / bf16": MixedPrecisionPolicy(torch.float32, torch.bfloat16),
    "reduce fp64": MixedPrecisionPolicy(reduce_dtype=torch.float64),
    "output bf16": MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.bfloat16),
}


class Turn(nn.Module):
    """Beside a real weight, a complex one; all gradients are sums of small integers."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.complex(torch.arange(6.0), -torch.arange(6.0)))
        self.scale = nn.Parameter(torch.ones(6))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x * self.turn).sum() + self.scale.sum()


def batch(rank: int) -> Tensor:
    return torch.complex(torch.full((6,), rank + 1.0), torch.full((6,), 2.0 * rank - 4.0))


@pytest.mark.filterwarnings("ignore::polyshard.errors.IneffectiveSettingWarning")
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=["sharded", "replicated"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
@ranks(2)
def test_gradients_are_those_of_one_process(
    rank: int, size: int, policy: Any, shape: tuple[int, ...]
) -> None:
    single = Turn()
    (sum(single(batch(r)) for r in range(size))).backward()
    mesh = init_device_mesh(
        torch.get_default_device().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )
    model: Any = fully_shard(Turn(), mesh=mesh, mp_policy=policy)
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        model(batch(rank)).backward()
    gradients = [[p.grad for p in m.parameters()] for m in (model, single)]
    for found, expected in zip(*gradients, strict=True):
        assert found is not None
        assert expected is not None
        assert found.dtype == expected.dtype
        assert torch.equal(full(found), expected)


def test_collectives_get_real_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has no complex numbers, and torch makes pairs of them for some collectives alone."""

    def summed(out: Tensor, source: Tensor, **_: Any) -> None:
        assert not out.is_complex()
        assert not source.is_complex()
        out.copy_(source[: out.numel()] * 2)  # as the first of two equal ranks

    monkeypatch.setattr(collective, "reduce_single", summed)
    transport = SimpleNamespace(size=2, rank=0, reduce_group=None, together=lambda _: nullcontext())
    extents = [Extents(2, (2, 2))]
    route: Any = collective.CollectiveReduce(extents, torch.complex64, transport)  # type: ignore[arg-type]
    source = torch.complex(torch.arange(4.0, device="cpu"), -torch.arange(4.0, device="cpu"))
    out = torch.zeros(2, dtype=torch.complex64, device="cpu")
    sources = [source]
    route.prepare(sources)
    route.start(sources, [out])
    assert out.tolist() == [0, 2 - 2j]


class Conjugated(nn.Module):
    """Autograd leaves gradients of it that are conjugated when they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.complex(torch.arange(6.0), -torch.arange(6.0)))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x * self.turn.conj()).sum()


@ranks(2)
def test_lazily_conjugated_gradients(rank: int, size: int) -> None:
    single, model = Conjugated(), fully_shard(Conjugated())
    (sum(single(batch(r)) for r in range(size)) / size).backward()
    model(batch(rank)).backward()
    found: Any = model.turn
    assert single.turn.grad is not None
    torch.testing.assert_close(full(found.grad), single.turn.grad.resolve_conj())
