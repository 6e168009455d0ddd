"""Ranks that differ, fail or stay away: every other rank learns at once of it, and which it was."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from toy_codecs import BytesGather, Codecs, GatherFactory
from toy_meeting import await_all
from toy_models import Model, build, loss_of, shard, tokens_for
from toy_refusals import refused

from polyshard import MixedPrecisionPolicy, fully_shard, hookimpl
from polyshard._torch.private import default_store
from polyshard.errors import PeerError, PlanMismatchError, SettingError
from polyshard.failures import Part
from polyshard.sharding.layout import GroupLayout
from polyshard_testing import World, ranks


@ranks(2)
def test_different_models(rank: int, size: int) -> None:
    model = shard(Model(hidden=64 if rank else 80), fully_shard)
    with pytest.raises(PlanMismatchError) as caught:
        model(tokens_for(0, rank))
    text = str(caught.value)
    assert "rank 0 (-) against ranks [1] (+):" in text
    assert re.search(r"-group blocks\.0: parameter blocks\.0\.up\.weight \(80, 192\)", text)
    assert re.search(r"\+group blocks\.0: parameter blocks\.0\.up\.weight \(64, 192\)", text)
    good = shard(build(), fully_shard)  # the next model is not confused by the last
    loss_of(good, tokens_for(0, rank)).backward()


@ranks(3)
def test_different_policies(rank: int, size: int) -> None:
    dtype = torch.bfloat16 if rank == 2 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model = shard(build(), fully_shard, mp_policy=policy)
    refused(PlanMismatchError, r"against ranks \[2\].*\n.*dtypes", model, tokens_for(0, rank))


def one_rank_fails(rank: int, size: int) -> None:
    model = build()
    if rank == 1:
        model.register_parameter("odd", nn.Parameter(torch.zeros(4)))
    placement = (lambda p: Shard(3) if p.shape == (4,) else None) if rank == 1 else None
    if rank == 1:
        refused(SettingError, r"'odd'", fully_shard, model, shard_placement_fn=placement)
        return
    fully_shard(model, shard_placement_fn=placement)
    pattern = r"rank 1 failed while planning: ShardDimError: .*'odd'"
    refused(PlanMismatchError, pattern, model, tokens_for(0, rank))


def test_a_failing_rank_is_quoted_on_the_others() -> None:
    world = World(2)  # the failure stays on the board of this process group
    try:
        world.run(one_rank_fails, timeout=60.0)
    finally:
        world.close()


class Raising(Codecs):
    """Fails while a plan is built, on one rank."""

    @hookimpl
    def polyshard_observer(self, group: object) -> None:
        if dist.get_rank() == 1:
            raise OSError("no space left")


def one_rank_of_a_plugin_fails(rank: int, size: int) -> None:
    model = nn.Linear(2, 2)
    if rank == 1:
        with pytest.raises(OSError, match="no space left"):
            fully_shard(model, plugins=[Raising()])
        return
    fully_shard(model, plugins=[Raising()])
    pattern = r"rank 1 failed.*no space left \(raised by plugin 'codecs' \(1\.2\) in polyshard_obs"
    refused(PlanMismatchError, pattern, model, torch.ones(1, 2))


def test_a_failing_plugin_is_named_on_the_others() -> None:
    world = World(2)
    try:
        world.run(one_rank_of_a_plugin_fails, timeout=60.0)
    finally:
        world.close()


class Full(BytesGather):
    """Its disk is full from the second gather on, on rank 1."""

    calls = 0

    def encode(self, shard: torch.Tensor, payload: torch.Tensor) -> None:
        Full.calls += 1
        if Full.calls > 1 and dist.get_rank() == 1:
            raise OSError("no space left on device")
        super().encode(shard, payload)


class FullFactory(GatherFactory):
    def bind(self, group: object, layout: GroupLayout) -> Full:
        return Full(layout)


class Filling(Codecs):
    name = "filling"

    @hookimpl
    def polyshard_gather_codec(self, group: object) -> FullFactory:
        return FullFactory()


def one_rank_fails_in_a_step(rank: int, size: int) -> None:
    model: Any = fully_shard(nn.Linear(4, 4), plugins=[Filling()])
    x = torch.ones(1, 4)
    model(x).sum().backward()
    if rank == 1:
        with pytest.raises(OSError, match="no space left"):
            model(x)
    else:
        pattern = (
            r"group '\(root\)' did not complete, because rank 1 failed in group '\(root\)': OSE"
        )
        refused(PeerError, pattern, model, x)


def test_a_rank_that_fails_in_a_step_is_quoted_on_the_others() -> None:
    world = World(2, collective_seconds=30.0)
    try:
        world.run(one_rank_fails_in_a_step, timeout=60.0)
    finally:
        world.close()


@ranks(2)
def test_a_failure_that_was_reset_is_forgotten(rank: int, size: int) -> None:
    """A failure that was reset is not quoted again."""
    model: Any = fully_shard(nn.Linear(4, 4))
    x = torch.ones(1, 4)
    model(x).sum().backward()
    await_all("stepped", size)  # the failure would end this step for a rank that is behind
    with suppress(ZeroDivisionError, PeerError), Part("g"):
        if rank == 1:
            raise ZeroDivisionError("earlier")
    await_all("failed", size)
    model.reset_iter_state()
    await_all("reset", size)
    if rank == 0:
        with pytest.raises(KeyError), Part("g"):
            raise KeyError("new")  # not a PeerError about rank 1
    await_all("failed again", size)
    model.reset_iter_state()
    dist.barrier()
    model(x).sum().backward()


def one_rank_stays_away(rank: int, size: int) -> None:
    from datetime import timedelta

    store = default_store()
    assert store is not None
    model = shard(build(), fully_shard)
    if rank == 0:
        store.set_timeout(timedelta(seconds=2))  # shorter than rank 1 may be late until here
        pattern = r"ranks \[1\] of \[0, 1\] did not reach the first forward.*within 2 s"
        refused(PlanMismatchError, pattern, model, tokens_for(0, rank))


def test_an_absent_rank_is_named() -> None:
    world = World(2)
    try:
        world.run(one_rank_stays_away, timeout=60.0)
    finally:
        world.close()


def test_a_world_one_rank_short() -> None:
    """One process of two was started: the default mesh cannot come up, and says why."""
    program = """
        import os
        from datetime import timedelta
        import torch.distributed as dist
        from torch import nn
        from polyshard import fully_shard
        from polyshard.errors import MeshError

        start = dist.init_process_group
        dist.init_process_group = lambda: start("gloo", timeout=timedelta(seconds=2))
        try:
            fully_shard(nn.Linear(2, 2))
        except MeshError as error:
            print("MeshError:", error)
    """
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # any that is free: no other rank comes
        "PATH": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "MeshError:" in done.stdout, done.stderr
    assert "check that all ranks were started" in done.stdout
