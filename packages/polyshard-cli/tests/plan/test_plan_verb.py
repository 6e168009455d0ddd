"""The command line: tables and JSON, and one message for each mistake."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from polyshard_cli.plan.command import plan

TUNED = ("demo:tiny", "--mesh", "dp=4", "--batch", "4", "--keep", "mesh", "--tune")
PAIR = ("plan_models:Pair", "--inputs", "plan_models:pair_inputs", "--sequence", "4")


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command("plan")(plan)
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_tables_fit_80_columns() -> None:
    code, text = run("demo", "--mesh", "replicate=2,dp=4", "--bf16", "--parameters")
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    for word in ("Groups", "Memory of a device", "Every transfer", "Time of the step", "blocks.*"):
        assert word in text
    assert "all-reduce" in text  # over replicas


def test_json_is_the_same_plan() -> None:
    code, text = run(*PAIR, "--mesh", "dp=2", "--json")
    assert code == 0
    found = json.loads(text)
    assert found["schema"] == 1
    assert found["mesh"]["axes"] == [{"name": "dp", "size": 2, "role": "shard"}]
    (group,) = (g for g in found["groups"] if g["name"] == "layers.*")
    assert (group["count"], group["names"]) == (2, ["layers.0", "layers.1"])
    weight = group["parameters"][0]
    assert weight["by_axis"] == {"dp": "Shard(0)"}
    assert weight["by_dim"][0] == {"size": 8, "axes": ["dp"], "local": 4}
    assert found["model"]["parameters"] == 2 * (8 * 8 + 8)


def test_every_key_is_documented() -> None:
    page = Path(__file__).parents[4] / "docs" / "reference" / "plan.md"
    _, text = run(*PAIR, "--mesh", "replicate=2,dp=2", "--json")
    known = page.read_text("utf-8")
    missing = [key for key in sorted(keys(json.loads(text))) if f"`{key}`" not in known]
    assert not missing


def keys(value: Any, *, are_names: bool = False) -> set[str]:
    """Names of fields; not those that are data themselves (axes, roles, tiers)."""
    if isinstance(value, list):
        return set().union(*map(keys, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    found = set() if are_names else set(value)
    for key, inner in value.items():
        found |= keys(inner, are_names=key in {"by_axis", "claims", "tiers"})
    return found


def test_a_search_fits_80_columns() -> None:
    code, text = run(*TUNED, "--memory-budget", "1GiB", "--allow-lossy")
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    for word in ("Memory against time", "best", "Runner-up", "fully_shard(model"):
        assert word in text


def test_a_search_as_json_is_documented() -> None:
    code, text = run(*TUNED, "--json", "--keep", "offload")
    assert code == 0
    found = json.loads(text)
    assert found["schema"] == 1
    assert found["best"] in found["front"]
    assert found["best"]["chosen"]
    assert found["tried"] + sum(r["count"] for r in found["refused"]) > 10
    page = Path(__file__).parents[4] / "docs" / "reference" / "plan.md"
    known = page.read_text("utf-8")
    del found["units"]  # by words that are data
    assert not [key for key in sorted(keys(found)) if f"`{key}`" not in known]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nothing.like.this"], "Did you mean nothing.like:this?"),
        (["./nodir"], "there is no such directory. Give one that save_pretrained() wrote"),
        ([str(Path(__file__).parent / "paeg")], "page? Give one that save_pretrained() wrote"),
        (["plan_model:uneven"], "Did you mean plan_models?"),
        (["plan_models:unevn"], "did you mean plan_models:uneven?"),
        (["plan_models:raising"], "RuntimeError: the factory's own trouble"),
        (["plan_models:not_a_module"], "returned a int; it must return a torch.nn.Module"),
        (["plan_models:Empty"], "a Empty without parameters"),
        (["demo:tyni"], "did you mean demo:tiny?"),
        (["demo", "--mesh", "db=2"], "did you mean dp=2?"),
        (["demo", "--mesh", "dp"], "cannot read 'dp'"),
        (["demo", "--mesh", "dp=0"], "sizes of at least 1"),
        (["demo", "--mesh", "tp=2"], "--mesh dp=1,tp=2"),
        (["demo", "--mesh", "dp=2,fsdp=4"], "multiply their sizes into one: fsdp=8"),
        (["demo", "--mesh", "dp=4", "--batch", "6"], "--batch 8 would do"),
        (
            ["demo", "--mesh", "dp=4", "--batch", "8", "--accumulate", "3"],
            "4 data-parallel ranks x 3 micro-batches; --batch 12 would do",
        ),
        (["demo", "--accumulate", "0"], "a step has at least 1 micro-batch"),
        (["demo", "--placement", "plan_models:colums"], "did you mean plan_models:columns?"),
        (["demo:tiny", "--placement", "plan_models:uneven"], "calling it failed: TypeError"),
        (
            ["demo:tiny", "--mesh", "dp=1,tp=2", "--tp-plan", "plan_models:raising"],
            "--tp-plan plan_models:raising: calling it failed: RuntimeError: the factory's own",
        ),
        (["demo", "--mesh", "dp=4", "--rank", "4"], "0 to 3"),
        (["demo", "--mesh", "dp=4", "--reshard", "3"], "must divide the shard axis' 4"),
        (["demo", "--reshard", "often"], "write auto, yes, no"),
        (["demo", "--units", "bloks.*"], "the nearest is blocks"),
        (["demo", "--machine", "h100"], "did you mean h100x8?"),
        (["demo", "--machine", "nowhere.json"], "polyshard plan --measure nowhere.json"),
        (["demo", "--measure", "nodir/m.json"], "there is no directory nodir; make it first"),
        (["demo", "--measure", "h100x8"], "name a file that ends in .json"),
        (
            ["demo:tiny", "--mesh", "dp=1,tp=2", "--tp-plan", "plan_models:not_a_plan"],
            "tensor parallelism does not fit the model",
        ),
        (["demo", "--plugins", "nobody"], "no installed plugin is named 'nobody'"),
        (["demo", "--plugins", "plan_models:raising"], "the factory's own trouble"),
        (["demo", "--set", "hidden_size=4"], "changes fields of a transformers config"),
        (["demo", "--set", "hidden_size"], "write field=value"),
        (["demo", "--units", "blocks.*/two"], "as blocks.*/2"),
        (["demo", "--memory-budget", "1GiB"], "add --tune"),
        (["demo", "--tune", "--keep", "meshes"], "did you mean mesh?"),
        (["demo", "--tune", "--memory-budget", "much"], "write a size such as 70GiB"),
        ([*TUNED, "--memory-budget", "1KiB"], "The smallest takes"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_mistakes_are_one_message(arguments: list[str], expected: str) -> None:
    code, text = run(*arguments)
    assert code == 2
    said = " ".join(text.split())
    assert said.count("error:") == 1
    assert expected in said


@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        (["--quantize", "int8"], "polyshard_quantized"),
        (["--offload", "params=host"], "polyshard_offload"),
        (["--mesh", "dp=2,tp=2"], "polyshard_tensor_parallel"),
    ],
)
def test_missing_plugins_are_named(
    arguments: list[str], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "polyshard_cli.plan.request.plugins.find_spec",
        lambda name: None if name == package else object(),
    )
    code, text = run("demo:tiny", *arguments)
    assert code == 2
    assert f"pip install {package.replace('_', '-')}" in " ".join(text.split())


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_configs_of_transformers(tmp_path: Path) -> None:
    code, text = run("LlamConfig")
    assert (code, "did you mean LlamaConfig?" in " ".join(text.split())) == (2, True)
    code, text = run("LlamaConfig", "--set", "num_hiden_layers=2")
    assert (code, "did you mean num_hidden_layers=2?" in " ".join(text.split())) == (2, True)
    for value in ("num_hidden_layers=four", "num_attention_heads=7"):
        code, text = run("LlamaConfig", "--set", value)
        said = " ".join(text.split())
        assert (code, "transformers makes no config of it" in said) == (2, True), said
    code, text = run("AutoConfig")
    assert (code, "error: MODEL AutoConfig" in " ".join(text.split())) == (2, True)
    code, text = run(str(tmp_path))
    assert (code, "no config.json" in " ".join(text.split())) == (2, True)
    import_module("transformers").LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        max_position_embeddings=32,
    ).save_pretrained(str(tmp_path))
    code, text = run(str(tmp_path), "--mesh", "dp=2", "--json")
    assert code == 0
    found = json.loads(text)
    assert (found["model"]["units"], found["model"]["sequence"]) == (3, 32)
    assert found["timing"]["compute_seconds"] > 0


def test_a_model_that_does_not_run_is_planned_without_activations() -> None:
    code, text = run("plan_models:Pair", "--mesh", "dp=2", "--json")
    assert code == 0
    found = json.loads(text)
    assert found["timing"] is None
    assert next(n["code"] for n in found["notices"]) == "no-activations"
    assert {phase["activations"] for phase in found["memory"]["phases"]} == {0}
