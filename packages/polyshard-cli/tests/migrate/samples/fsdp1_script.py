"""FSDP1, with units by class."""

import functools

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        """``width`` features."""
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        result: torch.Tensor = values + self.down(self.up(values).relu())
        return result


def train(rank: int, steps: int = 4) -> list[float]:
    """Losses of this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), Block(5), Block(5), nn.Linear(5, 1))
    # each block is gathered by itself
    blocks = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    sharded = FSDP(
        model,
        auto_wrap_policy=blocks,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device("cpu"),  # no accelerator
        use_orig_params=True,
    )
    assert isinstance(sharded, FSDP)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    losses = []
    for _ in range(steps):
        loss = (sharded(torch.randn(3, 4)) - 1).square().mean()
        loss.backward()
        sharded.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
