"""The document of a model that is sharded already is that of its plan."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
from plan_runs import described, of_the_default_mesh, refusal, settings_of

from polyshard_cli.plan import Document, draft, parse_mesh
from polyshard_cli.plan.estimate.memory import Phase
from polyshard_cli.plan.estimate.traffic import Transfer
from polyshard_testing.world import World


def resting(document: Document) -> Phase:
    return document.memory.phases[0]


def of_the_engine(document: Document) -> list[Transfer]:
    """Those of a plan that was run on meta hold what the model itself sends, too."""
    own = {axis.name for axis in document.mesh.axes if axis.role == "tensor"}
    return [one for one in document.traffic if one.axis not in own]


def check(world: World, factory: str, mesh: str, given: dict[str, object]) -> None:
    settings = settings_of(factory, mesh, given)
    for rank, found in enumerate(world.run(described, settings, factory)):
        said = draft(replace(settings, rank=rank))
        assert found.groups == said.groups
        assert found.mesh == said.mesh
        assert resting(found) == resting(said)
        assert found.memory.tiers == said.memory.tiers
        assert list(found.traffic) == of_the_engine(said)
        assert found.timing is None
        assert found.model.parameters == said.model.parameters
        assert "no-activations" in {notice.code for notice in found.notices}
        assert found.to_json()


@pytest.mark.parametrize("given", [{}, {"bf16": True, "reshard": False}], ids=["fp32", "bf16"])
def test_fsdp(world2: World, given: dict[str, object]) -> None:
    check(world2, "uneven", "dp=2", given)


def test_hsdp(world4: World) -> None:
    check(world4, "uneven", "replicate=2,dp=2", {})


@pytest.mark.skipif(
    not all(map(find_spec, ("polyshard_quantized", "polyshard_offload"))),
    reason="needs polyshard-quantized and polyshard-offload",
)
def test_plugins(world2: World) -> None:
    check(world2, "uneven", "dp=2", {"quantize": "int8", "offload": "params=host,optimizer=host"})


@pytest.mark.skipif(
    find_spec("polyshard_tensor_parallel") is None, reason="needs polyshard-tensor-parallel"
)
def test_tensor_parallel(world4: World) -> None:
    check(world4, "divided", "dp=2,tp=2", {})


def test_a_mesh_without_names(world2: World) -> None:
    """The default mesh: axes are called by what they do."""
    for found in world2.run(of_the_default_mesh):
        assert found.mesh == parse_mesh("dp=2")
        assert {axis for group in found.groups for p in group.parameters for axis in p.by_axis} == {
            "dp"
        }
        assert resting(found).parameters == 4 * (8 * 8 + 8) * 2 // 2


def test_models_that_no_document_fits(world4: World) -> None:
    for said in world4.run(refusal, []):
        assert "is not sharded by polyshard" in said
    for said in world4.run(refusal, ["dp=4", "replicate=2,dp=2"]):
        assert "on different meshes" in said
        assert "dp=4" in said
        assert "replicate=2,dp=2" in said
