"""Vocabularies that tensor parallelism does not divide, with torch's FSDP2 x TP as the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from toy_models import full
from tp_models import Mlp, meshes, mlp, problems_of

from polyshard import clip_grad_norm_, describe, fully_shard
from polyshard.errors import UnsupportedError
from polyshard_tensor_parallel import TensorParallel
from polyshard_testing import World, ranks


class Words(nn.Module):
    """Embedding, an even block, and a head with a bias over the same words."""

    def __init__(self, words: int, *, tied: bool = False, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.block = Mlp(width, 12)
        self.head = nn.Linear(width, words)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.embedding(tokens)))
        return out


def words(count: int, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    return Words(count, **kwargs)


def plan(*, keeps_logits: bool = False) -> dict[str, ParallelStyle]:
    """Every layer divided; logits whole, or left cut for a parallel loss."""
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "block.up": ColwiseParallel(),
        "block.down": RowwiseParallel(),
        "head": ColwiseParallel(
            output_layouts=Shard(-1) if keeps_logits else Replicate(),
            use_local_output=not keeps_logits,
        ),
    }


def batch(count: int, step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randint(0, count, (3, 9), generator=generator)


def steps(model: Any, count: int, part: int, *, parallel_loss: bool = False) -> list[float]:
    """Losses and norms of training with clipping; the model keeps its last gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        tokens = batch(count, step, part)
        with loss_parallel() if parallel_loss else nullcontext():
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
            loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found += [full(loss.detach()).item(), full(norm).item()]
    return found


def whole_state(model: Any) -> dict[str, Tensor]:
    return {name: full(value.detach()).clone() for name, value in model.named_parameters()}


def of_torch(model: Any, mesh: Any, styles: dict[str, ParallelStyle], *, tied: bool = False) -> Any:
    parallelize_module(model, mesh["tp"], styles)
    if tied:
        model.head.weight = model.embedding.weight
    torch_fully_shard(model.block, mesh=mesh["dp"])
    return torch_fully_shard(model, mesh=mesh["dp"])


def of_ours(model: Any, mesh: Any, styles: Any) -> Any:
    plugin = TensorParallel(styles, mesh=mesh["tp"])
    plugin.apply(model)
    fully_shard(model.block, mesh=mesh["dp"], plugins=[plugin])
    return fully_shard(model, mesh=mesh["dp"], plugins=[plugin])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("parallel_loss", [False, True], ids=["logits", "loss-parallel"])
@ranks(4)
def test_training_is_bitwise_fsdp2(rank: int, size: int, parallel_loss: bool, tied: bool) -> None:
    """257 words over two ranks of each axis: shards of both are uneven."""
    mesh, part = meshes(2, 2), rank // 2
    styles = plan(keeps_logits=parallel_loss)
    theirs = of_torch(words(257, tied=tied), mesh, styles, tied=tied)
    ours = of_ours(words(257, tied=tied), mesh, plan(keeps_logits=parallel_loss))
    expected = steps(theirs, 257, part, parallel_loss=parallel_loss)
    found = steps(ours, 257, part, parallel_loss=parallel_loss)
    assert found == expected
    state = whole_state(theirs)
    for name, value in whole_state(ours).items():
        assert torch.equal(value, state[name])
        assert value.shape == dict(words(257).named_parameters())[name].shape


@ranks(4)
def test_the_words_of_gpt2(rank: int, size: int) -> None:
    """50257: one step, losses of one process."""
    tokens = batch(50257, 0, 0)
    alone, model = words(50257), words(50257)
    of_ours(model, meshes(2, 2), plan())
    losses = []
    for each in (alone, model):
        loss = F.cross_entropy(each(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for name, value in alone.named_parameters():
        grad: Any = model.get_parameter(name).grad
        torch.testing.assert_close(full(grad), value.grad, rtol=1e-4, atol=1e-7)


@ranks(4)
def test_checkpoints_hold_words_in_their_order(rank: int, size: int, tmp_path: Path) -> None:
    """Saved on two by two ranks; read as plain tensors, and by four data-parallel ranks."""
    model = of_ours(words(257), meshes(2, 2), plan())
    steps(model, 257, rank // 2)
    expected = whole_state(model)
    options = StateDictOptions(full_state_dict=True)
    state: Any = get_model_state_dict(model, options=options)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    folder = str(tmp_path / "checkpoint")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    plain = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load({"model": plain}, checkpoint_id=folder)
    assert all(torch.equal(plain[name], value) for name, value in expected.items())
    other = fully_shard(words(257))
    state = other.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    other.load_state_dict(state)
    assert all(torch.equal(full(p.detach()), expected[n]) for n, p in other.named_parameters())


@pytest.fixture(scope="module")
def world6() -> Iterator[World]:
    world = World(6)
    yield world
    world.close()


def three_by_two(rank: int, size: int, folder: str) -> list[str]:
    mesh, part = meshes(3, 2), rank // 2
    theirs, ours = of_torch(words(13), mesh, plan()), of_ours(words(13), mesh, plan())
    torch.testing.assert_close(steps(ours, 13, part), steps(theirs, 13, part), rtol=1e-5, atol=0)
    expected = whole_state(ours)
    for name, value in whole_state(theirs).items():
        if not name.startswith(("embedding", "head")):
            torch.testing.assert_close(expected[name], value, rtol=1e-4, atol=1e-5)
    dcp.save({"model": ours.state_dict()}, checkpoint_id=folder)
    plain = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load({"model": plain}, checkpoint_id=folder)
    assert all(torch.equal(plain[name], value) for name, value in expected.items())
    reference = words(13)
    reference.load_state_dict(plain)
    tokens = batch(13, 7, part)
    torch.testing.assert_close(ours(tokens), reference(tokens), rtol=1e-5, atol=1e-6)
    ours.reshard()
    return [str(ours.get_parameter(n).placements) for n in ("embedding.weight", "head.bias")]


def test_pieces_that_no_placements_describe_go_elsewhere(world6: World, tmp_path: Path) -> None:
    """13 words, cut into 7 and 6, and those over three ranks; FSDP2's checkpoint fails to load.

    The next dim is sharded instead; what has none is kept whole.
    """
    found = world6.run(three_by_two, str(tmp_path / "checkpoint"))
    assert found[0] == ["(Shard(dim=1), Shard(dim=0))", "(Replicate(), Shard(dim=0))"]
    assert all(answer == found[0] for answer in found)


def asked_for(rank: int, size: int) -> None:
    mesh = meshes(3, 2)
    plugin = TensorParallel(plan(), mesh=mesh["tp"])
    model = words(13)
    plugin.apply(model)
    with pytest.raises(UnsupportedError, match=r"'embedding.weight' .* into 2 uneven pieces"):
        fully_shard(model, mesh=mesh["dp"], plugins=[plugin], shard_placement_fn=lambda p: Shard(0))


def test_a_dim_that_was_asked_for_is_not_exchanged(world6: World) -> None:
    world6.run(asked_for)


def test_a_remainder_that_activations_lose_is_refused() -> None:
    """Torch raises in the first forward; and takes the same layers with whole activations."""
    text = problems_of({"up": ColwiseParallel(), "down": RowwiseParallel()}, mlp(hidden=9))
    assert "'up.weight' (9, 10) has 9 on dim 0" in text
    assert "Pass output_layouts=Replicate() or use_local_output=False" in text
    assert "'down.weight' (10, 9) has 9 on dim 1" in text
    assert "Pass input_layouts=Replicate()" in text


@ranks(2)
def test_uneven_layers_between_whole_activations(rank: int, size: int) -> None:
    mesh = meshes(1, 2)
    model, alone = mlp(hidden=9), mlp(hidden=9)
    styles = {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate()),
    }
    plugin = TensorParallel(styles, mesh=mesh["tp"])
    plugin.apply(model)
    fully_shard(model, mesh=mesh["dp"], plugins=[plugin])
    x = torch.linspace(-1, 1, 30).view(3, 10)
    out, expected = model(x), alone(x)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for name, value in alone.named_parameters():
        grad: Any = model.get_parameter(name).grad
        torch.testing.assert_close(full(grad), value.grad)


# Found by itself --------------------------------------------------------------------------------


@ranks(4)
def test_dtensors_find_the_installed_plugin(rank: int, size: int) -> None:
    """Torch's two calls with another import: nothing names the plugin."""
    mesh, part = meshes(2, 2), rank // 2
    theirs = of_torch(words(256), mesh, plan())
    ours = words(256)
    parallelize_module(ours, mesh["tp"], plan())
    fully_shard(ours.block, mesh=mesh["dp"])
    fully_shard(ours, mesh=mesh["dp"])
    assert steps(ours, 256, part) == steps(theirs, 256, part)
    assert "tensor_parallel" in str(describe(ours))
    weight: Any = ours.embedding.weight
    placements = weight.placements
    assert placements == theirs.embedding.weight.placements
    assert "tensor_parallel" not in str(describe(fully_shard(mlp())))
