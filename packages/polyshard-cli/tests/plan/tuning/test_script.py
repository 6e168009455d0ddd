"""The Python that is printed runs, and sends what was said."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import plan_models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from polyshard import describe, stats
from polyshard_cli.plan import Settings, draft, parse_mesh
from polyshard_cli.plan.drafting import subject_of
from polyshard_cli.plan.tuning.script import script_of
from polyshard_testing.world import World

SEQUENCE = 16


def settings_of(given: dict[str, Any]) -> Settings:
    mesh = parse_mesh(given.pop("mesh", "dp=2"))
    chosen: dict[str, Any] = {"model": "plan_models:uneven", "backend": "gloo"} | given
    return Settings(mesh=mesh, batch=mesh.data_ranks, sequence=SEQUENCE, **chosen)


def ran(rank: int, size: int, code: str, factory: str) -> tuple[int, int, int]:
    """Bytes that the last of two steps sent, units, and the rank."""
    del size
    model = getattr(plan_models, factory)()
    names: dict[str, Any] = {"model": model}
    exec(compile(code, "pasted", "exec"), names)
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64)
    before = 0
    for _ in range(2):
        before = stats(model).bytes_sent
        logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    sent = stats(model).bytes_sent - before
    dist.barrier()
    return rank, sent, len(describe(model).groups)


def check(world: World, **given: Any) -> str:
    settings = settings_of(given)
    code = script_of(settings, subject_of(settings))
    for rank, sent, groups in world.run(ran, code, settings.model.partition(":")[2]):
        document = draft(replace(settings, rank=rank))
        assert sent == document.counted_bytes
        assert groups == sum(group.count for group in document.groups)
    return code


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"units": ("blocks.*/2", "head"), "reshard": False, "bf16": True},
        {
            "units": ("blocks.*.attention", "blocks.*.feed_forward"),
            "mesh": "replicate=2,dp=1",
            "optimizer": "momentum",
        },
        {"units": ("none",), "optimizer": "sgd", "reshard": True},
        {"placement": "plan_models:columns"},
    ],
    ids=["blocks", "runs", "parts", "none", "columns"],
)
def test_what_is_pasted_sends_what_was_said(world2: World, given: dict[str, Any]) -> None:
    check(world2, **given)


@pytest.mark.skipif(find_spec("polyshard_quantized") is None, reason="needs polyshard-quantized")
@pytest.mark.parametrize("quantize", ["int8,native", "int4"])
def test_with_codecs(world2: World, quantize: str) -> None:
    assert "QuantizedComm(" in check(world2, quantize=quantize)


@pytest.mark.skipif(find_spec("polyshard_offload") is None, reason="needs polyshard-offload")
def test_with_tiers(world2: World) -> None:
    code = check(world2, offload="optimizer=host,fraction=0.5")
    assert 'Offload(optimizer="host", fraction=0.5)' in code
    assert "offload.wrap(" in code


@pytest.mark.skipif(find_spec("polyshard_offload") is None, reason="needs polyshard-offload")
def test_with_a_disk(world2: World, tmp_path: Path) -> None:
    code = check(world2, offload=f"optimizer=disk, path={tmp_path},")
    assert f"disk=DiskSettings(path=Path('{tmp_path}'))" in code


@pytest.mark.skipif(
    find_spec("polyshard_tensor_parallel") is None, reason="needs polyshard-tensor-parallel"
)
def test_with_tensor_parallelism(world2: World) -> None:
    plan = "polyshard_tensor_parallel:demo_plan"
    check(world2, model="plan_models:divided", mesh="dp=1,tp=2", tp_plan=plan)


def test_plugins_of_the_user_are_imported_by_their_names() -> None:
    settings = settings_of({"plugins": ("plan_models:Watching", "plan_models:WATCHING")})
    code = script_of(settings, subject_of(settings))
    assert "from plan_models import WATCHING, Watching" in code
    assert '"plugins": [Watching(), WATCHING],' in code
