"""What shows transfers: torch's ``CommDebugMode`` counts collectives, ours are messages on gloo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from polyshard import fully_shard, stats
from polyshard_testing import ranks


class Transfers(TorchDispatchMode):
    """Names of all operations on process groups."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += str(func).startswith("c10d")
        return func(*args, **(kwargs or {}))


def sharded(engine: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 4))
    engine(model[0])
    return engine(model)


def step(model: nn.Module) -> None:
    model(torch.ones(2, 512)).sum().backward()


@ranks(2)
def test_stats_count_what_comm_debug_mode_counts_of_torchs(rank: int, size: int) -> None:
    theirs, ours = sharded(torch_fully_shard), sharded(fully_shard)
    step(theirs)
    step(ours)
    before = {name: (g.gathers, g.reductions) for name, g in stats(ours).groups.items()}
    with CommDebugMode() as expected:
        step(theirs)
    with CommDebugMode() as found:
        step(ours)
    counts = {str(name): n for name, n in expected.get_comm_counts().items()}
    after = {name: (g.gathers, g.reductions) for name, g in stats(ours).groups.items()}
    gathers = sum(after[name][0] - before[name][0] for name in after)
    reductions = sum(after[name][1] - before[name][1] for name in after)
    assert counts == {"c10d._allgather_base_": gathers, "c10d._reduce_scatter_base_": reductions}
    assert gathers > 0
    assert found.get_total_counts() == 0


@ranks(2)
def test_a_dispatch_mode_sees_every_message(rank: int, size: int) -> None:
    model = sharded(fully_shard)
    step(model)
    with Transfers() as transfers:
        step(model)
    sent = transfers.seen["c10d.send.default"]
    assert sent == transfers.seen["c10d.recv_.default"]
    assert sent > 0
