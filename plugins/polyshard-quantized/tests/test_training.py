"""On real ranks: bitwise what one process computes, in every composition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from quantized_models import (
    Model,
    Oracle,
    build,
    one_hop,
    plain_sum,
    shard,
    sum_of_pairs,
    tokens_for,
    train,
    two_hops,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from toy_models import loss_of

from polyshard import MixedPrecisionPolicy, Plugin, fully_shard, hookimpl
from polyshard_quantized import (
    BlockFormat,
    Exclusions,
    Float8Block,
    Int4Block,
    Int8Block,
    QuantizedComm,
    round_trip,
)
from polyshard_testing import World, ranks

FORMS: dict[str, BlockFormat] = {"int8": Int8Block(), "e4m3": Float8Block(), "int4": Int4Block()}


def exact(rank: int, size: int, weights: str | None, gradients: str | None) -> None:
    form = FORMS[weights] if weights else None
    reduce = FORMS[gradients] if gradients else None
    combine = one_hop(reduce) if reduce else plain_sum
    expected = Oracle(size, form, combine).train(build(), rank)
    plugin = QuantizedComm(weights=form, gradients=reduce)
    assert train(shard(build(), [plugin]), rank) == expected


@pytest.mark.parametrize(
    ("weights", "gradients"), [("int8", "int8"), ("e4m3", None), (None, "e4m3"), ("int4", "int4")]
)
def test_training_is_bitwise_that_of_one_process(
    world2: World, weights: str | None, gradients: str | None
) -> None:
    world2.run(exact, weights, gradients)


def test_uneven_worlds_and_worlds_of_one(world1: World, world3: World) -> None:
    for world in (world1, world3):
        world.run(exact, "int8", "int8")


@pytest.mark.parametrize("hierarchical", [True, False])
@ranks(4)
def test_two_hops_on_a_mesh_with_replicas(rank: int, size: int, hierarchical: bool) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    form = Int8Block()

    def first_hop_only(terms: list[Tensor]) -> Tensor:
        return sum_of_pairs([round_trip(t, form) for t in terms])

    combine = two_hops(form) if hierarchical else first_hop_only
    expected = Oracle(size, form, combine, sum_of_pairs).train(build(), rank)
    plugin = QuantizedComm(gradients=form, hierarchical=hierarchical)
    model = shard(build(), [plugin], mesh=mesh)
    assert train(model, rank) == expected
    (_, block, _) = plugin.report().groups
    assert block.reduce is not None
    assert (block.reduce.replica_bytes > 0) is hierarchical


@ranks(4)
def test_replicas_stay_equal_to_the_last_bit(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    model = shard(build(), [QuantizedComm(gradients=Int4Block())], mesh=mesh)
    loss_of(model, tokens_for(0, rank)).backward()
    for parameter in model.parameters():
        mine = parameter.grad.to_local()
        theirs = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(theirs, mine, group=mesh.get_group("replicate"))
        assert torch.equal(theirs[0], theirs[1])


@ranks(3, 1)
def test_every_rank_computes_with_the_same_values(rank: int, size: int) -> None:
    model = shard(build(), [QuantizedComm()])
    masters = {n: p.full_tensor() for n, p in model.named_parameters()}
    seen: list[Tensor] = []
    up = model.blocks[0].up
    up.register_forward_hook(lambda m, *_: seen.append(m.weight.detach().clone()))
    up.register_full_backward_hook(lambda m, *_: seen.append(m.weight.detach().clone()))
    loss_of(model, tokens_for(0, rank)).backward()
    forward, backward = seen
    expected = round_trip(masters["blocks.0.up.weight"], Int8Block())
    assert torch.equal(forward, backward)
    assert torch.equal(forward, expected)  # the owner's own rows too
    assert not torch.equal(forward, masters["blocks.0.up.weight"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), masters[name])  # masters are untouched


@pytest.mark.parametrize("weights", list(FORMS))
@ranks(2)
def test_overflow_is_seen_on_every_rank(rank: int, size: int, weights: str) -> None:
    model = shard(build(), [QuantizedComm(weights=FORMS[weights], gradients=Int8Block())])
    with torch.no_grad():
        weight = model.blocks[1].down.weight.to_local()
        if rank == 0:
            weight[0, 0] = torch.inf
    model(tokens_for(0, rank))
    assert not bool(torch.isfinite(loss_of(model, tokens_for(0, rank))))
    clean = shard(build(), [QuantizedComm(weights=FORMS[weights], gradients=Int8Block())])
    loss = loss_of(clean, tokens_for(0, rank)) * (1e39 if rank == 1 else 1.0)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(clean.parameters(), 1.0)
    assert isinstance(norm, DTensor)
    assert not bool(torch.isfinite(norm.full_tensor()))


@ranks(2)
def test_accumulation(rank: int, size: int) -> None:
    """Reduced every micro-batch: the sum of separate reductions, bitwise."""
    form = Int8Block()
    expected = Oracle(size, form, one_hop(form)).train(build(), rank, micro_batches=3)
    model = shard(build(), [QuantizedComm(gradients=form)])
    assert train(model, rank, micro_batches=3) == expected
    # Without synchronisation: quantized once, after the last micro-batch.
    plain, plugged = shard(build(), [QuantizedComm()]), model
    plugged = shard(build(), [QuantizedComm(gradients=form)])
    for each in (plain, plugged):
        each.set_requires_gradient_sync(False)
        loss_of(each, tokens_for(0, rank)).backward()
        each.set_requires_gradient_sync(True)
        loss_of(each, tokens_for(1, rank)).backward()
    for name, parameter in plugged.named_parameters():
        native = plain.get_parameter(name).grad.full_tensor()
        found = parameter.grad.full_tensor()
        if name == "blocks.0.up.weight":
            assert not torch.equal(found, native)
        scale = native.abs().amax()
        assert float((found - native).abs().max()) <= float(scale) * 2 / 127


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
FP16 = MixedPrecisionPolicy(torch.float16, torch.float16)
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "bf16": {"mp_policy": BF16},
    "fp16": {"mp_policy": FP16},
    "bf16 masters": {},
    "kept": {"reshard_after_forward": False},
    "resharded": {"reshard_after_forward": True},
    "compile": {},
    "checkpoint": {},
}


def _recompute(block: nn.Module) -> None:
    inner = block.forward

    def forward(x: Tensor) -> Any:
        return checkpoint(inner, x, use_reentrant=False)

    block.forward = forward


@pytest.mark.parametrize("kind", list(COMPOSITIONS))
@ranks(2)
def test_composition(rank: int, size: int, kind: str) -> None:
    """Within the error of the format of the same composition without the plugin."""
    losses = []
    for plugins in ([], [QuantizedComm(gradients=Int8Block())]):
        model = build().bfloat16() if kind == "bf16 masters" else build()
        block: Any
        for block in model.blocks:
            if kind == "compile":
                block.up.compile(backend="eager")
            elif kind == "checkpoint":
                _recompute(block)
        losses.append(train(shard(model, plugins, **COMPOSITIONS[kind]), rank))
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0.02)
    assert losses[1] != losses[0]


class Transposed(Plugin):
    """Shards matrices the other way round."""

    name = "transposed"

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, bool] | None:
        return (tensor.t(), True) if tensor.ndim == 2 else None

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: bool) -> Tensor:
        return tensor.t()


@ranks(2)
def test_the_form_that_is_sharded_is_quantized(rank: int, size: int) -> None:
    plugin = QuantizedComm(gradients=Int8Block())
    model = shard(build(), [plugin, Transposed()])
    losses = train(model, rank)
    torch.testing.assert_close(losses, train(shard(build(), []), rank), rtol=0.02, atol=0.02)
    assert all(
        g.gather is not None and g.gather.quantized_share > 0.9 for g in plugin.report().groups
    )


@ranks(2, 3)
def test_other_sharded_dims(rank: int, size: int) -> None:
    """Parameters sharded on another dim: rows are what lies behind it."""
    from torch.distributed.tensor import Shard

    torch.manual_seed(0)
    model: Any = nn.Linear(1, 1)
    model.weight = nn.Parameter(torch.randn(4, 30, 50))
    whole = model.weight.detach().clone()
    plugin = QuantizedComm(exclude=Exclusions(min_numel=0))
    fully_shard(
        model, shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else None, plugins=[plugin]
    )
    model.unshard()
    rows = round_trip(whole.reshape(120, 50), Int8Block()).view(whole.shape)
    assert torch.equal(model.weight.detach(), rows)
    model.reshard()


@ranks(2)
def test_unused_shared_and_frozen_parameters(rank: int, size: int) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(96, 96)
            self.shared = self.used
            self.unused = nn.Linear(96, 96)
            self.frozen = nn.Linear(96, 96)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.frozen(self.shared(self.used(x)))
            return out

    gradients = []
    for plugins in ([], [QuantizedComm(gradients=Int8Block())]):
        torch.manual_seed(0)
        model = Odd()
        fully_shard(model, plugins=plugins)
        model(torch.ones(2, 96) * (rank + 1)).sum().backward()
        assert model.unused.weight.grad is None
        assert model.frozen.weight.grad is None
        grad: Any = model.used.weight.grad
        gradients.append(grad.full_tensor())
    scale = float(gradients[0].abs().max())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0.05 * scale)


@ranks(2)
def test_payloads_are_encoded_once_a_step(rank: int, size: int) -> None:
    from polyshard_quantized.transfers.gather import BoundGather

    encoded: list[int] = []
    original = BoundGather.encode

    def counting(self: BoundGather, shard: Tensor, payload: Tensor) -> None:
        encoded.append(1)
        original(self, shard, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundGather, "encode", counting)
        model = shard(build(), [QuantizedComm()])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2):
            for micro in range(3):
                loss_of(model, tokens_for(step + micro, rank)).backward()
            assert len(encoded) == 3 * (step + 1)  # groups, once a step
            optimizer.step()
            optimizer.zero_grad()


@ranks(1)
def test_two_models_share_one_plugin_object(rank: int, size: int) -> None:
    plugin = QuantizedComm()
    first, second = (shard(build(seed), [plugin]) for seed in range(2))
    losses = [train(first, rank), train(second, rank)]
    alone = [train(shard(build(seed), [QuantizedComm()]), rank) for seed in range(2)]
    assert losses == alone
    assert len(plugin.report().groups) == 6
    del first
    import gc

    gc.collect()
    assert len(plugin.report().groups) == 3
    assert isinstance(second, Model)


@ranks(2)
def test_training_after_inference_mode(rank: int, size: int) -> None:
    """What a first forward in inference mode makes is used by those that train."""
    model: Any = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    quantized = QuantizedComm(weights=Int8Block(16), exclude=Exclusions(min_numel=0))
    for layer in model:
        fully_shard(layer, plugins=[quantized])
    fully_shard(model, plugins=[quantized])
    with torch.inference_mode():
        before = model(torch.eye(16)).clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    after = model(torch.eye(16))
    assert not torch.equal(before, after.detach())
    after.sum().backward()


@ranks(2)
def test_names_exclude_what_is_unsharded_before_it_has_a_name(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    expected = [layer.weight.detach().clone() for layer in model]
    plugin = QuantizedComm(exclude=Exclusions(fqns=("1.*",)))
    for module in (*model, model):
        fully_shard(module, plugins=[plugin])
    for is_early in (True, False):
        for layer, weight in zip(model, expected, strict=True):
            layer.unshard()
            is_exact = torch.equal(layer.weight, weight)
            assert is_exact == (is_early or layer is model[1])
            layer.reshard()
        with torch.no_grad():
            model(torch.ones(1, 128))
