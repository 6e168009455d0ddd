"""Reports of bytes and errors, against what is counted and computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from quantized_models import build, shard, tokens_for, train
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from toy_models import loss_of
from wire import counted

from polyshard import describe, stats
from polyshard_quantized import Exclusions, Int8Block, QuantizedComm, round_trip
from polyshard_testing import ranks


@ranks(2, 3)
def test_bytes_are_exactly_as_predicted(rank: int, size: int) -> None:
    plugin = QuantizedComm(gradients=Int8Block())
    model = shard(build(), [plugin])
    preview = describe(model)
    train(model, rank, steps=1)  # plans are compared before the first gather
    before = stats(model).bytes_sent
    with counted() as seen:
        loss_of(model, tokens_for(0, rank)).backward()
    gathers = 2 * 2 + 1  # two blocks twice, the root once
    assert seen["sends"] == gathers * (size - 1)
    assert seen["exchanges"] == 3
    total = seen["send_bytes"] + seen["exchange_bytes"]
    assert total == stats(model).bytes_sent - before == preview.step_bytes
    report = plugin.report()
    assert seen["exchange_bytes"] == sum(g.reduce.wire_bytes for g in report.groups if g.reduce)
    native = describe(shard(build(), []))
    assert report.native_bytes == native.gather_bytes + native.reduce_bytes
    assert report.wire_bytes == preview.gather_bytes + preview.reduce_bytes


@ranks(4)
def test_bytes_between_replicas_are_exactly_as_predicted(rank: int, size: int) -> None:
    """What is gathered between replicas is what the report says, and nothing else is."""
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard")
    )
    plugin = QuantizedComm(gradients=Int8Block())
    model = shard(build(), [plugin], mesh=mesh)
    loss_of(model, tokens_for(0, rank)).backward()
    gathered: list[int] = []
    original = dist.ProcessGroup.allgather

    def counting(group: Any, outputs: list[list[Tensor]], inputs: list[Tensor], *args: Any) -> Any:
        (sent,) = inputs
        gathered.append(sent.nbytes)
        assert sent.dtype == torch.uint8
        return original(group, outputs, inputs, *args)

    def native(*args: Any, **keywords: Any) -> None:
        raise AssertionError("sums of replicas travelled natively")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "allgather", counting)
        patch.setattr(dist.ProcessGroup, "allreduce", native)
        loss_of(model, tokens_for(1, rank)).backward()
    reduces = [g.reduce for g in plugin.report().groups if g.reduce]
    assert sorted(gathered) == sorted(r.replica_bytes for r in reduces)  # to one other replica


@ranks(2, 3)
def test_reports(rank: int, size: int) -> None:
    plugin = QuantizedComm(gradients=Int8Block(), exclude=Exclusions(fqns=("head.*",)))
    model = shard(build(), [plugin])
    text = str(describe(model))
    assert "gather codec quantized(weights Int8Block(block_elements=256)" in text
    assert "native because its name matches 'head.*': head.weight" in text
    assert "native because ndim 1 < 2: norm.weight, norm.bias" in text
    names = [g.name for g in plugin.report().groups]
    assert names == ["blocks.0", "blocks.1", "(root)"]
    errors = plugin.relative_errors(model)
    assert "head.weight" not in errors
    assert "blocks.0.norm.weight" not in errors
    for name in ("embedding.weight", "blocks.1.down.weight"):
        value = model.get_parameter(name).full_tensor()
        relative = float((round_trip(value, Int8Block()) - value).norm() / value.norm())
        assert abs(errors[name] - relative) < 1e-6


@ranks(2, 3)
def test_errors_of_what_is_gathered(rank: int, size: int) -> None:
    """Weights that stay gathered are measured where they rest; a tied one counts once."""
    plugin = QuantizedComm()
    model: Any = shard(build(), [plugin])
    train(model, rank, steps=1)
    expected = plugin.relative_errors(model)
    model.set_reshard_after_backward(False)
    loss_of(model, tokens_for(1, rank)).backward()
    assert plugin.relative_errors(model) == expected
    assert len(expected) > 2
