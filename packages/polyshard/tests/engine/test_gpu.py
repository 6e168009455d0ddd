"""What only an accelerator can show: streams, coalesced launches, the caching allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from toy_models import assert_same_parameters, build, loss_of, shard, tokens_for

from polyshard import MixedPrecisionPolicy, fully_shard
from polyshard_testing import ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "policy",
    [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)],
    ids=["fp32", "bf16"],
)
@ranks(1)
def test_one_rank_equals_fsdp2(rank: int, size: int, policy: MixedPrecisionPolicy) -> None:
    mesh = init_device_mesh("cuda", (size,))
    models = [
        shard(build(), f, mesh=mesh, mp_policy=policy) for f in (torch_fully_shard, fully_shard)
    ]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    for step in range(4):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = loss_of(model, tokens_for(step, rank).cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert_same_parameters(models[1], models[0], exact=True)


@ranks(1)
def test_memory_returns_to_the_same_value(rank: int, size: int) -> None:
    mesh = init_device_mesh("cuda", (size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard(build(width=512, hidden=1024), fully_shard, mesh=mesh, mp_policy=policy)
    seen = []
    for step in range(6):
        loss_of(model, tokens_for(step, rank).cuda()).backward()
        for parameter in model.parameters():
            parameter.grad = None
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
    assert len(set(seen[2:])) == 1


@ranks(1)
def test_a_captured_graph_reads_what_is_gathered_later(rank: int, size: int) -> None:
    """Unsharded parameters keep their addresses, so a graph of the forward can be replayed."""
    mesh = init_device_mesh("cuda", (size,))
    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
    model: Any = fully_shard(nn.Linear(64, 64).cuda(), mesh=mesh, mp_policy=policy)
    model.set_keep_unsharded_storage(True)
    x = torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)
    model(x).sum().backward()  # plans, gathers, and takes the memory
    model.unshard()
    weight, bias = model.weight, model.bias
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        torch.nn.functional.linear(x, weight, bias)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = torch.nn.functional.linear(x, weight, bias)
    for step in range(3):
        model.reshard()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(1.0 + step)
        model.unshard()
        assert model.weight.data_ptr() == weight.data_ptr()
        graph.replay()
        torch.cuda.synchronize()
        expected = torch.nn.functional.linear(x, model.weight, model.bias)
        assert torch.equal(out, expected)
        assert expected[0, 0].item() == 65 * (1.0 + step)
