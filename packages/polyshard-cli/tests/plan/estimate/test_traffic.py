"""Predicted bytes are those that real ranks send."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from plan_runs import sent_in_a_step, settings_of

from polyshard_cli.plan import Document, Settings, draft, parse_mesh
from polyshard_testing.world import World


def predicted(document: Document) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in document.traffic:
        if one.is_counted:
            found[one.unit] = found.get(one.unit, 0) + one.sent_bytes
    return found


def folded(groups: dict[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, sent in ((name, sent) for name, sent in groups.items() if sent):
        label = "blocks.*" if name.startswith("blocks.") else name
        found[label] = found.get(label, 0) + sent
    return found


def check(world: World, factory: str, mesh: str, given: dict[str, object]) -> None:
    settings = settings_of(factory, mesh, given)
    axes = {axis.role: axis.name for axis in settings.mesh.axes}
    for real in world.run(sent_in_a_step, settings, factory):
        document = draft(replace(settings, rank=real["rank"]))
        assert predicted(document) == folded(real["groups"]), real["rank"]
        assert document.counted_bytes == sum(real["groups"].values())
        payloads: dict[str, int] = {}
        for one in document.traffic:
            payloads[one.axis] = payloads.get(one.axis, 0) + one.payload_bytes
        assert payloads.get(axes.get("replicate", ""), 0) == real["replicas"]
        assert payloads.get(axes.get("tensor", ""), 0) == real["own"]


@pytest.mark.parametrize(
    ("factory", "given"),
    [
        ("uneven", {}),
        ("frozen", {"bf16": True}),
        ("uneven", {"reshard": False}),
        ("uneven", {"placement": "plan_models:columns"}),
        ("uneven", {"accumulate": 2}),
        ("frozen", {"accumulate": 3, "bf16": True}),
    ],
    ids=["fp32", "frozen bf16", "kept", "columns", "accumulated", "accumulated bf16"],
)
def test_fsdp_on_two_ranks(world2: World, factory: str, given: dict[str, object]) -> None:
    check(world2, factory, "dp=2", given)


@pytest.mark.parametrize(
    ("mesh", "given"),
    [
        ("dp=4", {"reshard": 2}),
        ("replicate=2,dp=2", {"bf16": True}),
        ("replicate=2,dp=2", {"accumulate": 2, "reshard": False}),
    ],
    ids=["blocks", "hsdp", "accumulated"],
)
def test_fsdp_and_hsdp_on_four_ranks(world4: World, mesh: str, given: dict[str, object]) -> None:
    check(world4, "uneven", mesh, given)


@pytest.mark.skipif(find_spec("polyshard_quantized") is None, reason="needs polyshard-quantized")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("quantize", ["int8", "int8,native"])
def test_quantized(world2: World, quantize: str, accumulate: int) -> None:
    check(world2, "uneven", "dp=2", {"quantize": quantize, "accumulate": accumulate})


@pytest.mark.skipif(find_spec("polyshard_quantized") is None, reason="needs polyshard-quantized")
def test_quantized_sums_over_replicas(world4: World) -> None:
    check(world4, "uneven", "replicate=2,dp=2", {"quantize": "int8"})


@pytest.mark.skipif(find_spec("polyshard_offload") is None, reason="needs polyshard-offload")
def test_offload(world2: World) -> None:
    check(world2, "uneven", "dp=2", {"offload": "params=host,optimizer=host"})


@pytest.mark.sampled(3)
@pytest.mark.skipif(
    find_spec("polyshard_tensor_parallel") is None, reason="needs polyshard-tensor-parallel"
)
@pytest.mark.parametrize(
    ("mesh", "accumulate"), [("dp=2,tp=2", 1), ("replicate=2,dp=1,tp=2", 1), ("dp=2,tp=2", 2)]
)
def test_tensor_parallel(world4: World, mesh: str, accumulate: int) -> None:
    check(world4, "divided", mesh, {"accumulate": accumulate})


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_sums_of_micro_batches_travel_in_the_reduce_dtype(backend: Any) -> None:
    """NCCL's kernels add in the dtype that travels; over gloo a single backward sends bf16."""

    def sent(accumulate: int) -> int:
        settings = Settings(
            model="plan_models:uneven",
            mesh=parse_mesh("dp=2"),
            batch=2 * accumulate,
            accumulate=accumulate,
            sequence=16,
            bf16=True,
            backend=backend,
        )
        return sum(
            t.sent_bytes for t in draft(settings).traffic if t.collective == "reduce-scatter"
        )

    assert sent(2) == sent(1) * (1 if backend == "nccl" else 2)
