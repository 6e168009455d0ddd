"""The demo's options: what is refused and what a resume may change."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyshard_demo.checkpoint import check_continues, write_run
from polyshard_demo.errors import DemoError
from polyshard_demo.report import Evaluation, History, Step
from polyshard_demo.settings import Settings
from polyshard_demo.text import Corpus
from polyshard_demo.train import learning_rate

OUT = Path("run")
TEXT = Corpus("a text", b"abc")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps must be at least 1"),
        ({"eval_every": -1}, "--eval-every must be at least 0"),
        ({"lr": 0.0}, "--lr must be above 0"),
        ({"lr": float("nan")}, "--lr must be above 0"),
        ({"preset": "huge"}, "--preset must be one of tiny, small, medium"),
        ({"batch": 10, "ranks": 4}, "use a multiple of 4"),
        ({"batch": 8, "ranks": 2, "accumulate": 3}, "use a multiple of 6"),
        ({"engine": "torch", "plugins": "offload"}, "--plugins needs --engine polyshard"),
        ({"engine": "torch", "offload": "params=host"}, "--offload needs --engine polyshard"),
        ({"engine": "torch", "quantize": "int8"}, "--quantize needs --engine polyshard"),
        ({"engine": "torch", "trace": Path("t")}, "--trace needs --engine polyshard"),
        ({"engine": "single"}, "use --ranks 1"),
        ({"engine": "single", "ranks": 1, "bf16": True}, "--bf16"),
        ({"engine": "single", "ranks": 1, "shard_ranks": 1}, "--shard-ranks needs an engine"),
        ({"ranks": 4, "shard_ranks": 3}, "--shard-ranks 3 does not divide 4"),
        ({"ranks": 4, "shard_ranks": 8}, "--shard-ranks 8 does not divide 4"),
        ({"timeout": -1}, "--timeout must be at least 0"),
        ({"dropout": 1.0}, "--dropout must be at least 0 and below 1"),
        ({"dropout": float("nan")}, "--dropout must be at least 0 and below 1"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DemoError, match=message):
        Settings(out=OUT, **options)


def test_the_mesh_of_shards_and_replicas() -> None:
    assert Settings(out=OUT, ranks=4).data_mesh == (4,)
    assert Settings(out=OUT, ranks=4, shard_ranks=2).data_mesh == (2, 2)
    assert Settings(out=OUT, ranks=2, shard_ranks=2).data_mesh == (1, 2), "one host is left"


def test_settings_are_plain_data() -> None:
    settings = Settings(out=OUT, text=Path("a.txt"), plugins="offload, quantized")
    assert settings.plugin_names == ("offload", "quantized")
    assert json.loads(json.dumps(settings.to_plain())) == settings.to_plain()


def test_resume_may_change_speed_but_not_the_model_or_data(tmp_path: Path) -> None:
    write_run(Settings(out=tmp_path), TEXT)
    faster = Settings(out=OUT, ranks=4, lr=1.0, steps=999, bf16=True)
    check_continues(tmp_path, faster, Corpus("renamed", TEXT.content))
    other = Settings(out=OUT, preset="tiny", seed=7)
    preset, seed = r"--preset: saved 'small', now 'tiny'\n", "  --seed: saved 0, now 7\n"
    with pytest.raises(DemoError, match=f"{preset}{seed}  --text: saved a text, now b or another"):
        check_continues(tmp_path, other, Corpus("b", b"bcd"))


@pytest.mark.parametrize("name", ["reproducible", "dropout"])
def test_a_resume_keeps_slots_and_dropout(tmp_path: Path, name: str) -> None:
    """Runs that were saved before there were any had none."""
    asked, plain = Settings(out=tmp_path, reproducible=8, dropout=0.5), Settings(out=tmp_path)
    write_run(asked, TEXT)
    check_continues(tmp_path, asked, TEXT)

    def save(settings: dict[str, Any]) -> None:
        record = {"settings": settings, "text": TEXT.name, "digest": TEXT.digest}
        (tmp_path / "run.json").write_text(json.dumps(record))

    def older(settings: Settings) -> dict[str, Any]:
        return {key: value for key, value in settings.to_plain().items() if key != name}

    for saved in (asked.to_plain() | {name: 0}, older(asked)):
        save(saved)
        with pytest.raises(DemoError, match=f"--{name}: saved 0.*, now "):
            check_continues(tmp_path, asked, TEXT)
    save(older(plain))
    check_continues(tmp_path, plain, TEXT)


def test_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    settings = Settings(out=OUT, steps=200, lr=1.0)
    assert [learning_rate(settings, step) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
    assert learning_rate(settings, 105) == pytest.approx(0.55)
    assert learning_rate(settings, 200) == pytest.approx(0.1)
    assert learning_rate(replace(settings, steps=1), 1) == 1.0


def test_history_survives_json() -> None:
    history = History([Step(1, 5.5, 0.1, 1e-3, 2048, 0.5)], [Evaluation(1, 5.4)])
    again = History()
    again.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert again == history
    assert (again.last, again.steps[0].speed) == (1, 4096.0)


def test_lines_say_how_long_the_rest_takes() -> None:
    step = Step(3, 2.5, 1.0, 1e-3, 256, 10.0)
    assert step.line(6, 1 << 20, 10.2) == (
        "step     3/6  loss 2.5000        26 tokens/s  1 MiB  0:00:31 left"
    )
    assert replace(step, step=6).line(6, 1 << 20, 10.2).endswith("  1 MiB")
