"""FSDP2's tensor-subclass protocol, with torch's own engine as the oracle."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from toy_codecs import Codecs
from toy_models import build, full, loss_of, shard, tokens_for
from toy_tensors import Coded, Moody, Nibbles, OldForm, Wrapped

from polyshard import describe, fully_shard, stats
from polyshard.engine.root import unit_of
from polyshard.errors import ConflictError, ModuleError, PluginError, UnsupportedError
from polyshard_testing import World, raises_in_step, ranks


def wrap(model: nn.Module, kind: type[Wrapped], trainable: bool = True) -> nn.Module:
    """Every linear weight of the blocks as a subclass.

    Not the head: its 101 rows are uneven, and FSDP2 fails there on the ranks with padding only.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "head":
            weight = kind(module.weight.detach().clone())
            module.weight = nn.Parameter(weight, requires_grad=trainable)
    return model


@pytest.mark.parametrize("trainable", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", [Coded, OldForm])
@ranks(2)
def test_two_ranks_are_bitwise_fsdp2(
    rank: int, size: int, kind: type[Wrapped], trainable: bool
) -> None:
    batches = [tokens_for(s, rank) for s in range(3)]
    models: list[Any] = [wrap(build(hidden=256), kind, trainable) for _ in range(2)]
    for block in models[0].blocks:
        torch_fully_shard(block)
    torch_fully_shard(models[0])
    ours = shard(models[1], fully_shard)
    runs = []
    for model in (models[0], ours):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2)
        losses = []
        for tokens in batches:
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append(losses)
    assert runs[1] == runs[0]
    assert "tensor class" in str(describe(ours))


class Lossless(nn.Module):
    """One uneven weight whose values are whole numbers, so that int8 codes are exact."""

    def __init__(self, kind: type[Wrapped], rows: int) -> None:
        super().__init__()
        values = torch.randint(-127, 128, (rows, 6), generator=torch.Generator().manual_seed(1))
        values[:, 0] = 127  # every row's scale is one
        self.weight = nn.Parameter(kind(values.float()))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


@pytest.mark.parametrize("rows", [7, 2])
@ranks(3)
def test_uneven_and_empty_shards(rank: int, size: int, rows: int) -> None:
    model: Any = Lossless(Coded, rows)
    whole = model.weight.detach().held.clone()
    fully_shard(model)
    x = torch.full((2, 6), float(rank + 1))
    for _ in range(2):
        out = model(x)
        torch.testing.assert_close(out, x @ whole.t())
        out.sum().backward()
    mean = sum(range(1, size + 1)) / size
    found = full(model.weight.grad)
    torch.testing.assert_close(found, torch.full((rows, 6), 2 * 2 * mean))
    sent = stats(model).groups["(root)"]
    chunk = -(-rows // size)
    codes, scales = -(-chunk * 6 // 64) * 64, -(-chunk * 4 // 64) * 64
    gathers = describe(model).groups[0].gather_bytes
    assert gathers == (size - 1) * (codes + scales)
    assert sent.gathers == 2


@ranks(2)
def test_unsharded_memory_is_freed(rank: int, size: int) -> None:
    model: Any = Lossless(Coded, 8)
    fully_shard(model)
    model(torch.ones(1, 6)).sum().backward()
    unit = unit_of(model)
    assert unit is not None
    runtime = unit.groups[0].prepare()
    assert runtime.leaves[0].untyped_storage().nbytes() == 0
    state = model.state_dict()["weight"]
    assert isinstance(state.to_local(), Coded)


class Frozen(nn.Module):
    """A packed, frozen base and a trained low-rank update, as in QLoRA; the base is uneven."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = nn.Parameter(base, requires_grad=False)
        self.update = nn.Parameter(torch.zeros(7, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.base + self.update).t()


@ranks(2, 3)
def test_packed_frozen_tensors(rank: int, size: int) -> None:
    values = torch.randn(7, 4, generator=torch.Generator().manual_seed(2))
    base = Nibbles.pack(values)
    reference = base.unpack()
    assert (reference - values).abs().max() < values.abs().max() / 10
    model: Any = fully_shard(Frozen(base))
    x = torch.full((3, 4), float(rank + 1))
    for _ in range(2):
        out = model(x)
        assert torch.equal(out, x @ reference.t())
        out.sum().backward()
    mean = sum(range(1, size + 1)) / size
    assert torch.equal(full(model.update.grad), torch.full((7, 4), 2 * 3 * mean))
    assert model.base.grad is None
    plans = {p.roles.gather_codec: p for p in describe(model).groups}
    (plan,) = (p for name, p in plans.items() if name.startswith("tensor class"))
    rows = -(-7 // size)
    assert plan.gather_bytes < (size - 1) * rows * 4 * 4 + 64 * 2 * (size - 1)
    assert isinstance(model.base.to_local(), Nibbles)


@ranks(2)
def test_refusals(rank: int, size: int) -> None:
    class Half(Wrapped):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            return (self.held,), None

    class Three(OldForm):
        def fsdp_pre_all_gather(self, a: Any, b: Any, c: Any) -> Any:  # type: ignore[override]
            return (self.held,), None

    with pytest.raises(ModuleError, match=r"'weight' is a Half that lacks fsdp_post_all_gather"):
        fully_shard(Lossless(Half, 4))
    with pytest.raises(ModuleError, match=r"Three.fsdp_pre_all_gather takes 3 arguments"):
        fully_shard(Lossless(Three, 4))
    with pytest.raises(ConflictError, match=r"\(weight\) bring FSDP2's.*claims its gather codec"):
        fully_shard(Lossless(Coded, 4), plugins=[Codecs()])
    moody: Any = fully_shard(Lossless(Moody, 4))
    with raises_in_step(PluginError, r"'weight': fsdp_pre_all_gather returned.*planned were"):
        moody(torch.ones(1, 6))
    moody.reset_iter_state()  # on a device the failure ended the communicators


@ranks(4)
def test_blocks_are_refused(rank: int, size: int) -> None:
    with pytest.raises(UnsupportedError, match=r"reshard_after_forward=2.*protocol \(weight\)"):
        fully_shard(Lossless(OldForm, 8), reshard_after_forward=2)


@ranks(2)
def test_beside_plain_parameters(rank: int, size: int) -> None:
    """Subclassed and plain parameters of one unit are groups of their own, and both train."""
    model: Any = wrap(build(hidden=256), OldForm)
    plain = shard(build(hidden=256), fully_shard)
    shard(model, fully_shard)
    batches = [tokens_for(s, rank) for s in range(2)]
    kinds = [len(unit_of(b).groups) for b in model.blocks]  # type: ignore[union-attr]
    assert kinds == [2, 2, 2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    reference = torch.optim.SGD(plain.parameters(), lr=0.2)
    for tokens in batches:
        losses = [loss_of(m, tokens) for m in (model, plain)]
        assert losses[0].item() == losses[1].item()
        for loss, each in zip(losses, (optimizer, reference), strict=True):
            loss.backward()
            each.step()
            each.zero_grad()


def torchao_int8(rank: int, size: int) -> bool:
    try:
        training = importlib.import_module("torchao.prototype.quantized_training")
        quantization = importlib.import_module("torchao.quantization")
    except ImportError:
        return False
    batches = [tokens_for(s, rank) for s in range(3)]
    runs = []
    for engine in (torch_fully_shard, fully_shard):
        model: Any = build(hidden=256)
        quantization.quantize_(
            model,
            training.int8_weight_only_quantized_training(),
            filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "head",
        )
        shard(model, engine)
        losses = []
        for tokens in batches:  # torchao's tensors need optimizers of its own: none steps here
            loss = loss_of(model, tokens)
            loss.backward()
            losses.append(loss.item())
        gradient = model.blocks[0].up.weight.grad
        runs.append([*losses, gradient.full_tensor().sum().item()])
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-3, atol=1e-3)
    return True


def test_torchao(world2: World) -> None:
    if not all(world2.run(torchao_int8)):
        pytest.skip("torchao is not installed")
