"""Living processes of an elastic job: some leave, the rest make a new process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn
import polyshard, polyshard_resilience

dist.init_process_group("gloo")
polyshard_resilience.enable()
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Linear(5, 3)
polyshard.fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def step():
    loss = model(torch.ones(2, 5)).square().mean()
    loss.backward()
    dist.all_reduce(loss.detach(), group=group)
    optimizer.step()
    optimizer.zero_grad()

def told(where):
    whole = [p.full_tensor() for p in model.parameters()]
    if dist.get_group_rank(group, dist.get_rank()) == 0:
        print(where, os.getpid(), float(sum(w.double().sum() for w in whole)).hex(), flush=True)

group = dist.group.WORLD
step()
told("three")
group = dist.new_group([1, 2])
polyshard_resilience.resize(model, optimizer, group if rank else None)
if rank == 0:
    raise SystemExit(0)  # the agent continues with the others
told("two")
step()
store = dist.distributed_c10d._get_default_store()
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank - 1, world_size=2)
group = dist.group.WORLD
polyshard_resilience.resize(model, optimizer, group)
step()
told("again")
group = dist.new_group([0])
polyshard_resilience.resize(model, optimizer, group if rank == 1 else None)
if rank == 1:
    step()
    told("one")
dist.barrier()
dist.destroy_process_group()
"""


def test_processes_live_on(tmp_path: Path) -> None:
    """Weights are those of one process that has made all steps."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(script)], capture_output=True, text=True, timeout=240, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert found["two"][1] == found["three"][1]
    assert found["two"][0] == found["again"][0] == found["one"][0]  # the same process
    assert len({value for _, value in found.values()}) == 3
