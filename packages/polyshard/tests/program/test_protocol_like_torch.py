"""What torch's own engine does with FSDP2's tensor-subclass protocol, case by case."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from toy_models import Model, build, full, loss_of, shard, tokens_for
from toy_tensors import Asking, Careless, Coded, OldForm, Wrapped

from polyshard import MixedPrecisionPolicy, describe, fully_shard
from polyshard.errors import UnsupportedError
from polyshard_testing import World, raises_in_step, ranks

ENGINES: tuple[Any, Any] = (torch_fully_shard, fully_shard)


def wrap(model: Model, kind: type[Wrapped]) -> Model:
    """Every linear weight of the blocks as a subclass."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "head":
            module.weight = nn.Parameter(kind(module.weight.detach().clone()))
    return model


def fill(model: nn.Module) -> None:
    """The same values in every sharded parameter, whatever engine cut it."""
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            local: Any = parameter.to_local()  # type: ignore[attr-defined]
            local = local.held if isinstance(local, Wrapped) else local
            values = torch.linspace(-0.1, 0.1, local.numel()).roll(index)
            local.copy_(values.view(local.shape))


def losses_of(model: nn.Module, rank: int, steps: int = 3) -> list[float]:
    """Of a few steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step in range(steps):
        loss = loss_of(model, tokens_for(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [Coded, OldForm])
@ranks(2)
def test_meta_init(rank: int, size: int, kind: type[Wrapped]) -> None:
    runs = []
    for engine in ENGINES:
        with torch.device("meta"):
            model = build(hidden=256)
        shard(wrap(model, kind), engine)
        model.to_empty(device=torch.get_default_device())
        fill(model)
        weight: Any = model.get_parameter("blocks.0.up.weight")
        assert isinstance(weight.to_local(), kind)
        runs.append(losses_of(model, rank))
    assert runs[1] == runs[0]


@pytest.mark.parametrize("kind", [Coded, OldForm])
@ranks(2)
def test_meta_init_by_assigned_state(rank: int, size: int, kind: type[Wrapped]) -> None:
    """A state dict with memory replaces parameters that have none."""
    runs = []
    for engine in ENGINES:
        source = shard(wrap(build(hidden=256), kind), engine)
        with torch.device("meta"):
            model = build(hidden=256)
        shard(wrap(model, kind), engine)
        model.load_state_dict(source.state_dict(), assign=True)
        runs.append(losses_of(model, rank))
    assert runs[1] == runs[0]


@ranks(4)
def test_the_mesh_handed_over_is_the_one_that_shards(rank: int, size: int) -> None:
    """Under HSDP the replicas have no part in a gather."""
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicas", "shards")
    )
    found = []
    for engine in ENGINES:
        model: Any = nn.Linear(6, 4, bias=False)
        model.weight = nn.Parameter(Asking(torch.ones(4, 6)))
        engine(model, mesh=mesh)
        assert torch.equal(model(torch.ones(1, 6)).detach(), torch.full((1, 4), 6.0))
        model.reshard()
        local: Any = model.weight._local_tensor
        found.append([(m.ndim, m.mesh.tolist(), m.mesh_dim_names) for m in local.meshes[-1:]])
    assert found[1] == found[0]
    assert found[0][0][1] == [[0, 1], [2, 3]][rank // 2]


def half_pre(
    self: Tensor, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> tuple[tuple[Tensor, ...], Any]:
    """Travels in bfloat16."""
    assert isinstance(mp_policy, MixedPrecisionPolicy)
    rows = -(-outer_size[0] // mesh.size())
    sent = self.new_zeros((rows, *self.shape[1:]), dtype=torch.bfloat16)
    sent[: self.shape[0]].copy_(self.detach())
    return (sent,), outer_size[0]


def half_post(
    self: Tensor,
    outputs: tuple[Tensor, ...],
    metadata: Any,
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Any:
    """Computes in the dtype asked for."""
    (whole,) = outputs
    if out is None:
        wide = whole.to(dtype)
        return wide, (whole, wide)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(whole[:metadata])
    return None


def patch(model: nn.Module, *, pre: Callable[..., Any] = half_pre) -> None:
    """Give the local tensors of weights the protocol; their class stays ``Tensor``."""
    for name, parameter in model.named_parameters():
        if name.endswith("weight"):
            local: Any = parameter._local_tensor  # type: ignore[attr-defined]
            local.fsdp_pre_all_gather = MethodType(pre, local)
            local.fsdp_post_all_gather = MethodType(half_post, local)


@pytest.mark.parametrize("hidden", [256, 251], ids=["even", "uneven"])
@ranks(2)
def test_methods_put_on_local_tensors(rank: int, size: int, hidden: int) -> None:
    """After sharding, on some parameters of a group: the others travel as ever."""
    runs, values = [], []
    for engine in ENGINES:
        model = shard(build(hidden=hidden), engine)
        patch(model)
        runs.append(losses_of(model, rank))
        values.append({n: full(p.detach()) for n, p in model.named_parameters()})
    plain = losses_of(shard(build(hidden=hidden), fully_shard), rank)
    assert runs[1] == runs[0]
    assert runs[1] != plain  # bfloat16 has travelled
    assert all(torch.equal(values[1][name], values[0][name]) for name in values[0])


@ranks(2)
def test_methods_put_on_local_tensors_after_meta_init(rank: int, size: int) -> None:
    runs = []
    for engine in ENGINES:
        with torch.device("meta"):
            model = build()
        shard(model, engine, mp_policy=MixedPrecisionPolicy())
        model.to_empty(device=torch.get_default_device())
        fill(model)
        patch(model)
        runs.append(losses_of(model, rank))
        model.eval()
        with torch.no_grad():
            runs[-1].append(loss_of(model, tokens_for(9, rank)).item())
    assert runs[1] == runs[0]


@ranks(2)
def test_what_such_methods_send_is_planned(rank: int, size: int) -> None:
    model: Any = fully_shard(nn.Linear(64, 32, bias=False))
    before = describe(model).groups[0].gather_bytes
    patch(model)  # after a plan was made, and before it is used
    (plan,) = describe(model).groups
    assert plan.roles.gather_codec.startswith("tensor class")
    assert plan.gather_bytes == before // 2
    model(torch.ones(1, 64))
    assert describe(model).groups[0].gather_bytes == before // 2  # while it is unsharded


@ranks(4)
def test_such_methods_and_what_else_decides_over_a_gather(rank: int, size: int) -> None:
    model = fully_shard(nn.Linear(8, 8, bias=False), reshard_after_forward=2)
    patch(model)
    with raises_in_step(UnsupportedError, r"reshard_after_forward=2.*protocol \(weight\)"):
        model(torch.ones(1, 8))


@ranks(2)
def test_uneven_shards_that_the_class_pads_itself(rank: int, size: int) -> None:
    """Its first gather is all that FSDP2 grants a class that fills ``out`` with padding and all."""
    x = torch.full((2, 1), float(rank + 1))
    runs = []
    for engine in ENGINES:
        model: Any = nn.Linear(1, 3, bias=False)
        model.weight = nn.Parameter(Careless(torch.arange(3.0).view(3, 1)))
        engine(model)
        out = model(x)
        out.square().sum().backward()
        runs.append([out.detach(), full(model.weight.grad)])
    assert all(torch.equal(ours, theirs) for theirs, ours in zip(*runs, strict=True))


@ranks(2)
def test_what_is_put_beside_the_data_reaches_padded_shards(rank: int, size: int) -> None:
    """A scale worked out beforehand is used on every rank, or ranks would not do the same."""
    model: Any = nn.Linear(2, 3, bias=False)
    model.weight = nn.Parameter(Asking(torch.ones(3, 2)))
    fully_shard(model)
    model.weight._local_tensor.scale = 3.0
    assert torch.equal(model(torch.ones(1, 2)).detach(), torch.full((1, 3), 6.0))


class Adapted(nn.Module):
    """A frozen packed linear layer and a trained low-rank update, as QLoRA has them."""

    def __init__(self, linear: nn.Linear, pack: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        wide, deep = linear.weight.shape
        self.base = nn.Parameter(pack(linear.weight.detach()), requires_grad=False)
        self.bias = linear.bias
        self.down = nn.Linear(deep, 8, bias=False)
        self.up = nn.Linear(8, wide, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = nn.functional.linear(x, self.base) + self.up(self.down(x))
        return out + self.bias


def qlora(pack: Callable[[Tensor], Tensor]) -> Model:
    """Only adapters train."""
    model = build(width=256, hidden=512)
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        for name in ("up", "down"):
            setattr(block, name, Adapted(getattr(block, name), pack))
    return model


def nf4_run(rank: int, size: int) -> dict[str, Any]:
    """Losses and adapters under both engines; empty without torchao."""
    try:
        packing: Any = importlib.import_module("torchao.quantization").NF4Tensor
    except (ImportError, AttributeError):
        return {}

    def pack(weight: Tensor) -> Tensor:
        packed: Tensor = packing.from_tensor(weight, 64, 256)
        return packed

    found: dict[str, Any] = {"losses": [], "adapters": [], "sent": 0}
    alone = size == 1  # torch's own engine takes no such tensors there: the oracle is the model
    for engine in ((lambda module: module) if alone else torch_fully_shard, fully_shard):
        model = shard(qlora(pack), engine)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        losses = []
        for step in range(4):
            loss = loss_of(model, tokens_for(step, rank))
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found["losses"].append(losses)
        found["adapters"].append([full(p.detach()).cpu() for p in trained])
        weight: Any = model.get_parameter("blocks.0.up.base")
        assert isinstance(weight if isinstance(weight, packing) else weight.to_local(), packing)
    found["sent"] = sum(p.gather_bytes for p in describe(model).groups)
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_nf4_base_and_trained_adapters(request: pytest.FixtureRequest, size: int) -> None:
    """QLoRA of torchao: bitwise, four bits a weight on the wire."""
    world: World = request.getfixturevalue(f"world{size}")
    for found in world.run(nf4_run):
        if not found:
            pytest.skip("torchao has no NF4Tensor here")
        assert found["losses"][1] == found["losses"][0]
        assert found["losses"][1][-1] < found["losses"][1][0]
        pairs = zip(found["adapters"][1], found["adapters"][0], strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        base_bytes = 6 * 256 * 512 // 2
        rest = found["sent"] - (size - 1) * base_bytes // 2
        assert rest <= (size - 1) * base_bytes // 2
