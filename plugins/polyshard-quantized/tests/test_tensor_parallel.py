"""Beside polyshard-tensor-parallel: what a tensor-parallel rank holds is what is quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from wire import counted

from polyshard import clip_grad_norm_, describe, fully_shard, stats
from polyshard_demo.model import LanguageModel, ModelSettings
from polyshard_quantized import Exclusions, Int4Block, Int8Block, QuantizedComm, round_trip
from polyshard_testing import World, ranks

pytest.importorskip("polyshard_tensor_parallel", reason="needs polyshard-tensor-parallel")
from polyshard_tensor_parallel import Plan, TensorParallel, demo_plan

SEQUENCE, STEPS = 16, 4
FORM = Int8Block()


def meshes(data_ranks: int) -> DeviceMesh:
    return init_device_mesh(
        torch.get_default_device().type, (data_ranks, 2), mesh_dim_names=("dp", "tp")
    )


def built(mesh: DeviceMesh, quantized: QuantizedComm | None) -> Any:
    """Two tensor-parallel ranks times the data-parallel ranks of ``mesh``."""
    torch.manual_seed(0)
    settings = ModelSettings(width=64, layers=2, heads=4, hidden=144, sequence=SEQUENCE)
    model: Any = LanguageModel(settings)
    tensor_parallel = TensorParallel(demo_plan(), mesh=mesh["tp"])
    tensor_parallel.apply(model)
    plugins: list[object] = [tensor_parallel]
    if quantized is not None:
        plugins.append(quantized)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], plugins=plugins)
    return fully_shard(model, mesh=mesh["dp"], plugins=plugins)


def comm() -> QuantizedComm:
    return QuantizedComm(weights=FORM, gradients=FORM)


def loss_of(model: nn.Module, step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    tokens = torch.randint(0, 256, (2, SEQUENCE + 1), generator=generator)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, part: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for step in range(STEPS):
        loss = loss_of(model, step, part)
        loss.backward()
        found.append(loss.item())
        found.append(clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@ranks(4)
def test_errors_are_those_of_blocks_along_the_data_axis(rank: int, size: int) -> None:
    """A row-parallel weight is cut twice: its rows over data, its columns over tensor ranks."""
    quantized = comm()
    model = built(meshes(2), quantized)
    describe(model)
    found = quantized.relative_errors(model)
    for name in ("blocks.0.feed_forward.up.weight", "blocks.0.feed_forward.down.weight"):
        whole = model.get_parameter(name).full_tensor()
        expected = float((round_trip(whole, FORM) - whole).norm() / whole.norm())
        assert expected / 3 < found[name] < expected * 3, name


@ranks(4)
def test_training_is_close_to_that_without_quantization(rank: int, size: int) -> None:
    mesh = meshes(2)
    part = mesh["dp"].get_local_rank()
    expected = train(built(mesh, None), part)
    found = train(built(mesh, comm()), part)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert found != expected


@ranks(4)
def test_bytes_are_exactly_as_predicted(rank: int, size: int) -> None:
    mesh = meshes(2)
    plugin = comm()
    model, native = built(mesh, plugin), built(mesh, None)
    preview, plain = describe(model), describe(native)
    part = mesh["dp"].get_local_rank()
    loss_of(model, 0, part).backward()  # plans are compared before the first gather
    before = stats(model).bytes_sent
    with counted() as seen:
        loss_of(model, 1, part).backward()
    assert seen["sends"] == 2 * 2 + 1  # two blocks twice, the root once, to one peer
    assert seen["exchanges"] == 3
    total = seen["send_bytes"] + seen["exchange_bytes"]
    assert total == stats(model).bytes_sent - before == preview.step_bytes
    assert total < 0.28 * plain.step_bytes  # rows of 36 to 72 values, so more scales than usual
    report = plugin.report()
    assert report.native_bytes == plain.gather_bytes + plain.reduce_bytes
    # What counts is what this rank holds: half of every matrix that is cut.
    held = {p.fqn: p.numel for g in report.groups if g.gather for p in g.gather.parameters}
    whole = model.get_parameter("blocks.0.feed_forward.up.weight").numel()
    assert held["blocks.0.feed_forward.up.weight"] == whole // 2


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def watched(module: nn.Module, seen: list[Tensor]) -> Callable[..., None]:
    def hook(*_: object) -> None:
        weight: Any = module.weight
        seen.append(local_of(weight.detach()).clone())

    return hook


def decoded(rank: int, size: int) -> dict[str, Tensor]:
    """Every rank, the owner too, computes with the round trip of its tensor-parallel part."""
    mesh = meshes(size // 2)
    model = built(mesh, comm())
    tp = mesh["tp"].get_local_rank()
    found = {}
    for name, dim in (("feed_forward.up", 0), ("feed_forward.down", 1)):
        module = model.blocks[0].get_submodule(name)
        master = module.weight.full_tensor()
        seen: list[Tensor] = []
        handles = (
            module.register_forward_hook(watched(module, seen)),
            module.register_full_backward_hook(watched(module, seen)),
        )
        loss_of(model, 0, 0).backward()
        for handle in handles:
            handle.remove()
        part = master.chunk(2, dim)[tp].contiguous()
        assert len(seen) == 2
        assert torch.equal(seen[0], seen[1])
        assert torch.equal(seen[0], round_trip(part, FORM))
        assert not torch.equal(seen[0], part)
        assert torch.equal(module.weight.full_tensor(), master)
        found[f"{tp} {name}"] = seen[0]
    return found


def test_decoded_values_do_not_depend_on_the_data_parallel_ranks(
    world2: World, world4: World
) -> None:
    alone: dict[str, Tensor] = {}
    for part in world2.run(decoded):
        alone.update(part)
    assert len(alone) == 4
    for part in world4.run(decoded):
        for name, value in part.items():
            assert torch.equal(value, alone[name]), name


@ranks(4)
def test_gradients_are_sums_of_quantized_local_parts(rank: int, size: int) -> None:
    """A gradient is the sum of the round trips of what ranks had, in order of the ranks."""
    mesh = meshes(2)
    part, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    model = built(mesh, comm())
    name = "blocks.0.feed_forward.down.weight"
    loss_of(model, 0, part).backward()
    terms = []
    for other in range(2):  # what each data-parallel rank computes, computed here
        single = built(mesh, QuantizedComm(weights=FORM))
        loss_of(single, 0, other).backward()  # both ranks the same batch: sums of equal terms
        grad: Any = single.get_parameter(name).grad
        terms.append(grad.full_tensor().chunk(2, 1)[tp].contiguous())
    expected = (round_trip(terms[0], FORM) + round_trip(terms[1], FORM)) / 2
    found: Any = model.get_parameter(name).grad
    assert torch.equal(found.full_tensor().chunk(2, 1)[tp], expected)


class Partly(nn.Module):
    """A pair of layers in the plan, and one outside it, whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.whole = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.whole(self.down(self.up(x)))
        return out


@pytest.mark.parametrize("replicas", [False, True])
@ranks(4)
def test_ranks_that_hold_the_same_draw_the_same_noise(rank: int, size: int, replicas: bool) -> None:
    """What several tensor-parallel ranks hold whole stays the same on all of them."""
    names = ("replicate", "dp", "tp")
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 1, 2) if replicas else (1, 2, 2), mesh_dim_names=names
    )
    torch.manual_seed(0)
    model: Any = Partly()
    tensor_parallel = TensorParallel(
        Plan({"up": ColwiseParallel(), "down": RowwiseParallel()}), mesh=mesh["tp"]
    )
    tensor_parallel.apply(model)
    quantized = QuantizedComm(
        gradients=Int4Block(8), rounding="stochastic", exclude=Exclusions(min_numel=0)
    )
    data = mesh["replicate", "dp"] if replicas else mesh["dp"]
    fully_shard(model, mesh=data, plugins=[tensor_parallel, quantized])
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank // 2))
    for _ in range(2):
        model(x).square().sum().backward()
    gradient = model.whole.weight.grad
    local = gradient.to_local()
    others = [torch.empty_like(local) for _ in range(2)]
    dist.all_gather(others, local.contiguous(), group=mesh.get_group("tp"))
    assert torch.equal(others[0], others[1])
