"""What is a matrix, who owns it, and what is refused."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matrix_models import Model, Run, blocks_of, muon
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import polyshard
from polyshard import fully_shard
from polyshard.errors import PluginError, UnsupportedError
from polyshard.plugins.seams import BoundReduceCodec, GroupInfo, ReduceCodec
from polyshard_optimizers import MatrixError, MatrixOptimizer, hidden_matrices
from polyshard_optimizers.matrix.choosing import Balance, Cut
from polyshard_testing import PluginConformance, raises_in_step, ranks
from polyshard_testing.runs import Factory


def nothing(name: str, shape: tuple[int, ...]) -> bool:
    return False


class TestBesideOthers(PluginConformance):
    """Where no matrix is chosen: with one, other optimizers have no gradient of it to step by."""

    @pytest.fixture
    def factory(self) -> Factory:
        return partial(MatrixOptimizer, torch.optim.Muon, matrices=nothing)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("attention.query.weight", (8, 8), True),
        ("experts", (2, 8, 8), True),
        ("norm.weight", (8,), False),
        ("embed.weight", (100, 8), False),
        ("tok_embeddings.weight", (100, 8), False),
        ("lm_head.weight", (100, 8), False),
        ("heads.weight", (8, 8), True),
        ("output.weight", (100, 8), False),
        ("model.head.weight", (100, 8), False),
        ("output", (100, 8), False),
        ("lm_head.dense.weight", (8, 8), False),
        ("attention.output.weight", (8, 8), True),
        ("blocks.0.self_attn.output.dense.weight", (8, 8), True),
        ("output.dense.weight", (8, 8), True),
        ("feed_forward.output.weight", (8, 8), True),
        ("attention.embed_positions.weight", (8, 8), False),
    ],
)
def test_hidden_matrices(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert hidden_matrices(name, shape) is expected


def test_cuts() -> None:
    whole = torch.arange(24.0).view(6, 4)
    cut = Cut.of("w", (6, 4), 3)
    assert [v.tolist() for v in cut.views(whole)] == [w.tolist() for w in whole.chunk(3)]
    assert Cut.of("e", (5, 2, 3), 1) == Cut(5, (2, 3))
    assert cut.cost == 3 * 2 * 2 * 4
    for shape, blocks in (((5, 4), 2), ((4,), 1), ((2, 2, 2), 2), ((4, 4), 0)):
        with pytest.raises(MatrixError, match="Choose others"):
            Cut.of("w", shape, blocks)


def test_owners_are_balanced_and_the_same_for_everybody() -> None:
    mesh = SimpleNamespace(mesh_dim_names=None, mesh=torch.arange(3), size=lambda: 3)
    group: Any = SimpleNamespace(mesh=mesh)
    cuts = [Cut(1, (n, n)) for n in (8, 4, 8, 8, 4, 4)] + [None]
    owners = Balance().owners(group, cuts)
    assert owners == [0, 0, 1, 2, 1, 2, None]
    balance = Balance()
    for _ in range(2):
        balance.owners(group, [Cut(1, (8, 8))])
    assert balance.owners(group, [Cut(1, (8, 8)), Cut(1, (2, 2))]) == [2, 0]


def test_settings_that_cannot_be() -> None:
    with pytest.raises(MatrixError, match="class of optimizers"):
        MatrixOptimizer("muon")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        MatrixOptimizer(torch.optim.Muon, speed=1)
    with pytest.raises(MatrixError, match=r"Only torch\.optim\.Muon"):
        MatrixOptimizer(torch.optim.SGD, lr=0.1, early=True)


@ranks(1)
def test_models_without_matrices_are_refused(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    plugin = MatrixOptimizer(torch.optim.Muon, matrices=lambda name, shape: False)
    model: nn.Module = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh, plugins=[plugin])
    with pytest.raises(MatrixError, match="no parameter of this model"):
        plugin.optimizer(model)
    assert len(plugin.rest(model)) == 2


@ranks(1)
def test_an_embedding_that_is_a_unit_is_none(rank: int, size: int) -> None:
    """It is called "weight" there, as a matrix would be."""
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    plugin = MatrixOptimizer(torch.optim.Muon)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, plugins=[plugin])
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(p)] for p in plugin.rest(model)] == ["0.weight", "1.bias"]


class Codec(ReduceCodec):
    name = "codec"

    def bind(self, group: GroupInfo, layout: Any) -> BoundReduceCodec:
        class Bound(BoundReduceCodec):
            payload_bytes = 8

            def encode(self, chunks: Any, payloads: Any) -> None: ...

            def decode_sum(self, payloads: Any, outs: Any) -> None: ...

        return Bound()


class Codecs(polyshard.Plugin):
    name = "codecs"

    @polyshard.hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> ReduceCodec:
        return Codec()


class Another(MatrixOptimizer):
    name = "another"


@ranks(2)
def test_what_needs_gradients_in_rows_is_refused(rank: int, size: int) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (size,))
    with pytest.raises(
        UnsupportedError, match=r"codecs.*encodes the gradients of all ranks in rows"
    ):
        Run(mesh, muon(), Codecs())
    with pytest.raises(PluginError, match="both claim the gradient landing"):
        fully_shard(Model(), mesh=mesh, plugins=[muon(), Another(torch.optim.Muon)])
    run = Run(mesh, muon())
    block: Any = run.model.blocks
    block[0].set_all_reduce_hook(lambda shard: None)
    with raises_in_step(UnsupportedError, "land whole on an owner instead"):
        run.backward(0, rank)


@ranks(2)
def test_owners_and_bytes_are_in_the_plan(rank: int, size: int) -> None:
    run = Run(init_device_mesh(torch.get_default_device().type, (size,)), muon())
    plans = polyshard.describe(run.model).groups
    lines = [line for plan in plans for line in plan.lines() if "gradient whole on rank" in line]
    assert len(lines) == 2 * 7  # the stacked ones stay in rows
    before = polyshard.stats(run.model).bytes_sent
    expected = polyshard.describe(run.model).step_bytes
    run.backward(0, rank)
    assert polyshard.stats(run.model).bytes_sent - before == expected
    assert blocks_of("query", (1, 1)) == 3


@pytest.mark.parametrize("gradients", ["whole", "rows"])
@ranks(2)
def test_models_that_are_dropped_are_let_go(rank: int, size: int, gradients: str) -> None:
    """While the plugin lives, and serves another one."""
    plugin, mesh = (
        muon(gradients=gradients),
        init_device_mesh(torch.get_default_device().type, (size,)),
    )
    stays, goes = Run(mesh, plugin), Run(mesh, plugin)
    goes.train(rank, 1)
    parts: Any = (goes.model, next(goes.model.parameters()), goes.optimizer)
    dropped = [weakref.ref(each) for each in parts]
    del parts
    del goes
    gc.collect()
    assert [each() for each in dropped] == [None] * 3
    stays.train(rank, 1)
    assert len(plugin._known.groups) == 2


@ranks(2)
def test_functions_are_asked_by_names_within_units(rank: int, size: int) -> None:
    def exactly(name: str, shape: tuple[int, ...]) -> int:
        return 3 if name == "query.weight" else 1

    plugin = MatrixOptimizer(torch.optim.Muon, blocks=exactly)
    run = Run(init_device_mesh(torch.get_default_device().type, (size,)), plugin)
    cuts = {
        chosen.name: chosen.cut.count for chosen in map(plugin.chosen, plugin._chosen(run.model))
    }
    assert {name for name, count in cuts.items() if count == 3} == {
        "blocks.0.query.weight", "blocks.1.query.weight"
    }  # fmt: skip
