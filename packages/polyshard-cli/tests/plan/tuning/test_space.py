"""What is searched is what was left open; what is not is said."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from polyshard_cli.plan import Open, PlanError, Settings, parse_mesh, tune
from polyshard_cli.plan.drafting import subject_of
from polyshard_cli.plan.estimate.machines import MACHINES, save_machine
from polyshard_cli.plan.tuning.search import KEEPABLE, Space, meshes_of, space_of

DEMO = Settings(model="demo:tiny", mesh=parse_mesh("replicate=2,dp=4"), batch=8)


def space(settings: Settings = DEMO, *keep: str, allow_lossy: bool = False) -> Space:
    given = Open(keep=frozenset(keep), allow_lossy=allow_lossy)
    return space_of(settings, subject_of(settings), given)


def test_meshes_have_as_many_ranks_and_the_names_given() -> None:
    found = meshes_of(parse_mesh("dp_shard=6,tp=2"), (1, 2, 5))
    assert [mesh.text for mesh in found] == [
        "dp_shard=6,tp=2",
        "dp_shard=12",
        "dp_replicate=2,dp_shard=6",
        "dp_replicate=3,dp_shard=4",
        "dp_replicate=4,dp_shard=3",
        "dp_replicate=6,dp_shard=2",
        "dp_replicate=12,dp_shard=1",
        "dp_replicate=2,dp_shard=3,tp=2",
        "dp_replicate=3,dp_shard=2,tp=2",
        "dp_replicate=6,dp_shard=1,tp=2",
    ]
    assert {mesh.ranks for mesh in found} == {12}


def test_what_is_kept_is_not_searched() -> None:
    (choice,) = space(DEMO, *KEEPABLE).choices()
    assert choice.applied(DEMO) == DEMO
    only_replicas = space(DEMO, "replicate", "tp").meshes
    assert [mesh.text for mesh in only_replicas] == ["replicate=2,dp=4"]
    assert set(space(DEMO, "mesh").units) == {
        "blocks",
        "blocks, tables",
        "parts",
        "parts, tables",
        "none",
    }


def test_what_settings_choose_stays() -> None:
    chosen = replace(DEMO, units=("blocks.*",), reshard=2)
    found = space(chosen, "mesh", "offload")
    assert [(c.units, c.reshard) for c in found.choices()] == [(("blocks.*",), 2)]


def test_blocks_of_ranks_are_those_that_divide() -> None:
    found = space(DEMO, "tp")
    assert found.reshards(parse_mesh("dp=8")) == (None, False, 2, 4)
    assert found.reshards(parse_mesh("replicate=4,dp=2")) == (None, False)


def test_lossy_codecs_must_be_allowed() -> None:
    pytest.importorskip("polyshard_quantized")
    plain = space(DEMO, "mesh")
    assert plain.quantize == ("",)
    assert any("--allow-lossy" in words for words in plain.skipped)
    allowed = space(DEMO, "mesh", allow_lossy=True)
    assert allowed.quantize[0] == ""
    assert "int8" in allowed.quantize
    assert allowed.plans == 4 * plain.plans


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("polyshard_tensor_parallel", "tensor parallelism: polyshard-tensor-parallel is not"),
        ("polyshard_quantized", "codecs: polyshard-quantized is not"),
        ("polyshard_offload", "tiers: polyshard-offload is not"),
    ],
)
def test_what_is_not_installed_is_said(
    package: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "polyshard_cli.plan.tuning.search.find_spec",
        lambda name: None if name == package else find_spec(name),
    )
    assert any(words.startswith(said) for words in space().skipped)


def test_a_host_is_no_tier_of_itself(tmp_path: Path) -> None:
    pytest.importorskip("polyshard_offload")
    path = tmp_path / "cpu.json"
    save_machine(replace(MACHINES["h100x8"], is_ahead=False), path)
    found = space(replace(DEMO, machine=str(path)), "mesh")
    assert found.offload == ("",)
    assert "tiers: the host is the device of this machine" in found.skipped
    assert len(space(DEMO, "mesh").offload) == 4
    assert space(replace(DEMO, optimizer="sgd"), "mesh").offload == ("", "params=host")


def test_meshes_that_the_batch_does_not_divide_over_are_refused() -> None:
    settings = Settings(model="plan_models:divided", mesh=parse_mesh("dp=4,tp=2"), sequence=16)
    if find_spec("polyshard_tensor_parallel") is None:
        pytest.skip("needs polyshard-tensor-parallel")
    plan = "polyshard_tensor_parallel:demo_plan"
    found = tune(replace(settings, tp_plan=plan), Open(keep=frozenset({"units", "offload"})))
    assert found.batch == 4
    reasons = [refusal.reason for refusal in found.refused]
    assert any("--batch 4 does not divide over 8" in reason for reason in reasons)
    assert any("does not fit the model" in reason for reason in reasons)


def test_unknown_things_to_keep() -> None:
    with pytest.raises(PlanError, match="did you mean units"):
        Open(keep=frozenset({"unit"}))
