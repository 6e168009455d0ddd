"""DeepSpeed: every key is answered, and a loop is rewritten where all of it is certain."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from migrate_runs import Migrated, migrated, unchanged

from polyshard_cli.migrate import Kind, MigrateError


def script(config: object = None, loop: str = "", initialize: str = "") -> str:
    given = {"zero_optimization": {"stage": 3}} if config is None else config
    call = initialize or (
        "engine, optimizer, _, _ = deepspeed.initialize(\n"
        "        model=model, optimizer=optimizer, config=config\n"
        "    )"
    )
    return (
        "import deepspeed\nimport torch\n\n\n"
        "def train(model, batches):\n"
        f"    config = {given!r}\n"
        "    torch.distributed.init_process_group()\n"
        "    # decays\n"
        "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
        f"    {call}\n"
        "    for batch in batches:\n"
        "        loss = engine(batch).sum()\n"
        "        engine.backward(loss)  # sums\n"
        "        engine.step()\n" + textwrap.indent(textwrap.dedent(loop), "        ")
    )


def stage(config: dict[str, Any], number: int = 3) -> dict[str, Any]:
    return {**config, "zero_optimization": {"stage": number, **config.get("zero_optimization", {})}}


def test_a_loop_is_rewritten() -> None:
    found = migrated(script(stage({"gradient_clipping": 0.5, "bf16": {"enabled": True}})))
    assert found.text[found.text.index("    # decays") :] == textwrap.indent(
        textwrap.dedent("""\
        # decays
        fully_shard(
            model,
            plugins=[SameValues()],
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine = model
        for batch in batches:
            loss = engine(batch).sum()
            loss.backward()  # sums
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        """),
        "    ",
    )
    assert "deepspeed" not in found.text
    assert not found.left


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 1}, "reshard_after_forward=False"),
        ({"stage": 2}, "reshard_after_forward=False"),
        ({"stage": 3}, ""),
        ({"stage": 3, "zero_hpz_partition_size": 8}, "reshard_after_forward=8"),
        ({"stage": 3, "zero_hpz_partition_size": 1}, ""),
        ({"stage": 3, "zero_quantized_weights": False}, ""),
        ({"stage": 3, "offload_optimizer": {"device": "none"}, "offload_param": None}, ""),
        (
            {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
            "reshard_after_forward=False",
        ),
    ],
)
def test_stages(zero: dict[str, Any], expected: str) -> None:
    found = migrated(script({"zero_optimization": zero}))
    then = f", {expected}" if expected else ""
    assert f"    fully_shard(model, plugins=[SameValues()]{then})\n" in found.text
    assert not found.left


@pytest.mark.parametrize(
    ("config", "key", "words"),
    [
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage", "`fully_shard(model)`"),
        ({}, "zero_optimization.stage", "nothing is sharded"),
        (stage({"fp16": {"enabled": True}}), "fp16", "GradScaler"),
        (stage({"bf16": {"enabled": True, "other": 1}}), "bf16", "bfloat16"),
        (stage({"amp": {"enabled": True}}), "amp", "Apex"),
        (stage({"optimizer": {"type": "Adam"}}), "optimizer", "torch.optim.AdamW"),
        (stage({"scheduler": {"type": "WarmupLR"}}), "scheduler", "step it after"),
        (stage({"gradient_accumulation_steps": 4}), "gradient_accumulation_steps", "no_sync()"),
        (stage({"gradient_clipping": "auto"}), "gradient_clipping", "transformers"),
        (stage({"communication_data_type": "int8"}), "communication_data_type", "reduce_dtype"),
        (stage({"communication_data_type": ["fp32"]}), "communication_data_type", "reduce_dtype"),
        (stage({"bf16": 1}), "bf16", "bfloat16"),
        (stage({"sparse_gradients": True}), "sparse_gradients", "dense"),
        (stage({"elasticity": {"enabled": True}}), "elasticity", "torchrun"),
        (stage({"pipeline": {"stages": 4}}), "pipeline", "torch.distributed.pipelining"),
        (stage({"unheard_of": 1}), "unheard_of", "unknown"),
        (
            {"zero_optimization": {"stage": 3, "unheard_of": 1}},
            "zero_optimization.unheard_of",
            "unknown",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "zero_optimization.zero_quantized_weights",
            "QuantizedComm(weights=Int8Block(256))",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
            "zero_optimization.zero_quantized_gradients",
            "QuantizedComm(gradients=Int8Block(256))",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer.device",
            'Offload(optimizer="host")',
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device",
            "Offload(params=",
        ),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 8}},
            "zero_optimization.mics_shard_size",
            "two axes",
        ),
    ],
)
def test_keys_that_need_a_hand_keep_the_script(
    config: dict[str, Any], key: str, words: str
) -> None:
    found = unchanged(script(config))
    assert key in [term for _, term in found.left]
    assert words in found.messages()


def test_refused_and_by_hand_are_told_apart() -> None:
    found = unchanged(script(stage({"sparse_gradients": True, "fp16": {"enabled": True}})))
    assert [term for _, term in found.of(Kind.REFUSED)] == ["sparse_gradients"]
    assert "fp16" in [term for _, term in found.of(Kind.HAND)]


@pytest.mark.parametrize(("clipping", "says"), [({}, True), ({"gradient_clipping": 0}, False)])
def test_a_default_that_depends_on_the_version(clipping: dict[str, Any], *, says: bool) -> None:
    found = migrated(script(stage(clipping)))
    assert ("gradient_clipping" in [term for _, term in found.of(Kind.DIFFERS)]) == says
    assert "clip_grad_norm_" not in found.text


def test_a_reduce_dtype() -> None:
    config = stage({"bf16": {"enabled": True}, "communication_data_type": "fp32"})
    assert "reduce_dtype=torch.float32" in migrated(script(config)).text


@pytest.mark.parametrize("by_name", ["config='ds.json'", "config_params='ds.json'"])
def test_a_json_file_beside_it(tmp_path: Path, by_name: str) -> None:
    text = json.dumps(stage({"gradient_clipping": 1.0, "wall_clock_breakdown": 1}), indent=2)
    (tmp_path / "ds.json").write_text(text)
    call = f"engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, {by_name})"
    found = migrated(script(initialize=call), folder=tmp_path)
    assert "clip_grad_norm_(model.parameters(), 1.0)" in found.text
    assert "ds.json:3: `wall_clock_breakdown` is left out" in found.messages()
    assert not found.left


def test_a_file_that_the_command_line_names(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(stage({}, 2)))
    call = "engine, _, _, _ = deepspeed.initialize(args=args, model=model, optimizer=optimizer)"
    unchanged(script(initialize=call))
    found = migrated(script(initialize=call), configuration=path)
    assert "reshard_after_forward=False" in found.text
    assert not found.left


def test_a_file_for_other_scripts_does_not_replace_a_scripts_own_dict(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(stage({"gradient_clipping": 0.5}, 2)))
    assert migrated(script(), configuration=path).text == migrated(script()).text


@pytest.mark.parametrize(
    ("content", "words"), [("{", "not JSON"), ("[]", "an object was expected"), ("\xff", "JSON")]
)
def test_a_broken_configuration(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "ds.json").write_text(content, "latin-1")
    call = "engine, _, _, _ = deepspeed.initialize(model=m, optimizer=o, config='ds.json')"
    with pytest.raises(MigrateError, match=words):
        migrated(script(initialize=call), folder=tmp_path)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("engine, _, _, _ = deepspeed.initialize(model=model, config=args.config)", "neither"),
        ("engine, _, _, _ = deepspeed.initialize(model=model, config='no.json')", "neither"),
        ("engine, _, _, _ = deepspeed.initialize(**kwargs)", "not all written out"),
        ("engine = deepspeed.initialize(model=model, config=config)[0]", "four names"),
        ("engine, _, loader, _ = deepspeed.initialize(model=model, config=config)", "loader"),
        ("engine, _, _, _ = deepspeed.initialize(model=model, config=config)", "optimizer"),
        ("engine, _, _, _ = deepspeed.initialize(model=build(), config=config)", "model"),
        (
            "engine, _, _, _ = deepspeed.initialize(model=model, config=config, lr_scheduler=s)",
            "`lr_scheduler=`",
        ),
        (
            "model = torch.compile(model)\n    engine, _, _, _ = deepspeed.initialize("
            "model=model, optimizer=optimizer, config=config)",
            "assigned again",
        ),
        (
            "optimizer = fused(optimizer)\n    engine, _, _, _ = deepspeed.initialize("
            "model=model, optimizer=optimizer, config=config)",
            "one statement above",
        ),
        (
            "if x:\n        engine, _, _, _ = deepspeed.initialize("
            "model=model, optimizer=optimizer, config=config)",
            "in the same block",
        ),
    ],
)
def test_calls_that_cannot_be_followed(call: str, words: str) -> None:
    found = unchanged(script(initialize=call))
    assert found.left
    assert words in found.messages()


@pytest.mark.parametrize(
    ("loop", "words"),
    [("evaluate(engine)\n", "passed on in line 17"), ("engine = other\n", "bound again")],
)
def test_an_engine_that_gets_away(loop: str, words: str) -> None:
    assert words in unchanged(script(loop=loop)).messages()


def left_in_loop(loop: str) -> Migrated:
    found = migrated(script(loop=loop))
    assert "fully_shard(model" in found.text
    return found


def test_methods_without_a_counterpart_are_listed() -> None:
    found = left_in_loop("""\
        engine.save_checkpoint("here")
        engine.module.weight
        total = engine.step()
        engine.backward(loss, retain_graph=True)
        engine.train()
    """)
    assert found.left == [
        (17, "save_checkpoint"),
        (18, "module"),
        (19, "step"),
        (20, "backward"),
    ]


@pytest.mark.parametrize("holder", ["engine", "model"])
def test_state_dicts_are_listed(holder: str) -> None:
    found = left_in_loop(f"save({holder}.state_dict())\n")
    assert found.left == [(17, "state_dict")]


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_a_step_where_a_name_is_another_is_listed(name: str) -> None:
    inner = f"def step({name}):\n    engine.backward(loss)\n    engine.step()\n"
    found = left_in_loop(inner)
    assert found.left == [(19, "step")]
    assert found.text.endswith("            loss.backward()\n            engine.step()\n")


def test_an_expression_is_parenthesised() -> None:
    found = left_in_loop("engine.backward(loss / 2)\n")
    assert "\n        (loss / 2).backward()\n" in found.text


def test_the_engine_may_be_called_as_the_model() -> None:
    call = (
        "model, optimizer, _, _ = deepspeed.initialize("
        "model=model, optimizer=optimizer, config=config)"
    )
    found = migrated(script(initialize=call).replace("engine", "model"))
    assert "lr=1e-3)\n    for batch" in found.text
    assert "loss.backward()  # sums\n        optimizer.step()\n" in found.text
    assert not found.left


def test_the_process_group() -> None:
    plain = script().replace(
        "torch.distributed.init_process_group()", "deepspeed.init_distributed()"
    )
    found = migrated(plain)
    assert "\n    torch.distributed.init_process_group()\n" in found.text
    assert not found.left
    named = plain.replace("init_distributed()", "init_distributed(dist_backend='gloo')")
    assert "init_process_group('gloo')" in migrated(named).text
    nobody = plain.replace("deepspeed.init_distributed()", "pass")
    assert [term for _, term in migrated(nobody).left] == ["init_distributed"]
    odd = plain.replace("init_distributed()", "init_distributed(timeout=3)")
    assert [term for _, term in migrated(odd).left] == ["init_distributed"]


def test_sharding_is_not_moved_above_the_start_of_the_process_group() -> None:
    begin = "torch.distributed.init_process_group()\n"
    plain = script()
    (line,) = [line for line in plain.splitlines() if "= deepspeed.initialize(" in line]
    indent = line[: len(line) - len(line.lstrip())]
    late = plain.replace(begin, "pass\n").replace(line, f"{indent}{begin}{line}")
    found = unchanged(late)
    assert "the process group starts between the optimizer and this call" in found.messages()


def test_two_engines_are_too_many() -> None:
    found = unchanged(script() + "\n\n" + script().replace("import deepspeed\nimport torch", ""))
    assert "more than once" in found.messages()


@pytest.mark.parametrize(
    "change",
    [
        "config['gradient_accumulation_steps'] = 4",
        "config['zero_optimization']['offload_param'] = {'device': 'cpu'}",
        "config['zero_optimization']['stage'] += 1",
        "del config['gradient_clipping']",
        "config.update(gradient_clipping=1.0)",
        "config['zero_optimization'].update(stage=2)",
        "fill(config, args)",
    ],
)
def test_a_dict_that_is_changed_is_not_what_it_was_written_as(change: str) -> None:
    start = "    torch.distributed.init_process_group()\n"
    changed = script().replace(start, f"    {change}\n{start}")
    found = unchanged(changed)
    assert [term for _, term in found.left] == ["config"]
    assert "which only reads it" in found.messages()


def test_a_dict_that_is_read_is_known() -> None:
    start = "    torch.distributed.init_process_group()\n"
    reads = "    size = config['train_batch_size'] + config.get('other', {}).get('size', 1)\n"
    assert not migrated(script().replace(start, reads + start)).left


SIZES = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}


def test_sizes_of_batches_that_ask_for_accumulation() -> None:
    found = unchanged(script(stage(SIZES)))
    assert "gradient_accumulation_steps" in [term for _, term in found.left]
    assert "64 / (4 * ranks)" in found.messages()


@pytest.mark.parametrize(
    "sizes",
    [
        {**SIZES, "gradient_accumulation_steps": 1},
        {**SIZES, "train_batch_size": "auto"},
        {"train_batch_size": 64},
        {"train_micro_batch_size_per_gpu": 4},
    ],
)
def test_sizes_of_batches_that_do_not(sizes: dict[str, Any]) -> None:
    assert not migrated(script(stage(sizes))).left
