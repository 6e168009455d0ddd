"""verl 0.9's own interface, actor and rollout in one process; skipped without verl."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from publish_runs import same_bits
from torch import Tensor, nn

from polyshard_publish import PublishError

base: Any = pytest.importorskip("verl.checkpoint_engine.base", exc_type=ImportError)


async def synchronized(actor: Any, rollout: Any, step: int) -> dict[str, Tensor]:
    """One update, as verl's manager makes it."""
    metadata = [actor.prepare(), rollout.prepare()]
    actors, rollouts = type(actor).build_topology(1, 1, metadata)
    actor.init_process_group(addresses=actors["addresses"][0])
    rollout.init_process_group(addresses=rollouts["addresses"][0])

    async def received() -> dict[str, Tensor]:
        return {name: t.clone() async for name, t in rollout.receive_weights(global_steps=step)}

    _, found = await asyncio.gather(actor.send_weights(None, global_steps=step), received())
    actor.finalize()
    rollout.finalize()
    return found


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_an_actor_and_a_rollout() -> None:
    from polyshard_publish.engines import verl as ours

    assert base.CheckpointEngineRegistry.get("polyshard") is ours.PolyshardCheckpointEngine
    make = base.CheckpointEngineRegistry.new
    actor, rollout = (make("polyshard", bucket_size=1 << 20, is_master=m) for m in (True, False))
    model = nn.Linear(30, 20)
    with pytest.raises(PublishError, match="attach"):
        actor.init_process_group(addresses=["localhost:1"])
    actor = make("polyshard", bucket_size=1 << 20)
    actor.attach(model, dtype=torch.bfloat16, keep="values")
    for step in (1, 2, 3):
        found = asyncio.run(synchronized(actor, rollout, step))
        wanted = {name: value.bfloat16() for name, value in model.state_dict().items()}
        assert found.keys() == wanted.keys()
        assert all(same_bits(found[name], wanted[name]) for name in wanted)
        with torch.no_grad():
            model.weight[step] += 1
