"""The guards of core know the axes of tensor parallelism too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tp_models import loss_of, meshes, shard_blocks, tiny, tokens_for

from polyshard.errors import NonFiniteError
from polyshard_resilience import Corruption, NonFinite
from polyshard_resilience.errors import CorruptionError
from polyshard_tensor_parallel import TensorParallel, demo_plan
from polyshard_testing import ranks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sequence", [False, True])
@ranks(4)
def test_both_guards_know_all_axes(rank: int, size: int, sequence: bool) -> None:
    """Training raises no alarm; one rank's bad element and one replica's write stop all four."""
    mesh = meshes(2, 2)
    plugin = TensorParallel(demo_plan(sequence_parallel=sequence), mesh=mesh["tp"])
    model: Any = tiny()
    plugin.apply(model)
    shard_blocks(model, mesh=mesh["dp"], plugins=[plugin])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = NonFinite(optimizer, model=model)
    memory = Corruption(model, optimizer, every=1)
    names = dict(model.named_parameters())
    replicated = next(n for n, p in names.items() if p.placements[-1].is_replicate())
    divided = next(n for n, p in names.items() if p.placements[-1].is_shard())
    for step in range(4):
        loss_of(model, tokens_for(step, rank // 2)).backward()
        guard.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model, tokens_for(9, rank // 2)).backward()
    if rank == 3:
        names[divided].grad.to_local().view(-1)[0] = float("inf")
    with pytest.raises(NonFiniteError, match=rf"'{divided}' \(1 of \d+ elements on rank 3\)"):
        optimizer.step()
    if rank == 2:  # written, and so no flipped bit, on one of ranks 2 and 3, which hold it alike
        names[replicated].detach().add_(1)
    with pytest.raises(CorruptionError, match=rf"'{replicated}' \(weights\): rank 2 and rank 3"):
        memory.check()
