"""The demo's options: what is refused and what a resume may change."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyshard_demo.errors import DemoError
from polyshard_demo.history import Evaluation, History, Step
from polyshard_demo.settings import Settings
from polyshard_demo.train import learning_rate

OUT = Path("run")


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
        ({"engine": "torch", "plugins": ("offload",)}, "--plugins needs --engine polyshard"),
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
    settings = Settings(out=OUT, text=Path("a.txt"), plugins=("offload",))
    assert json.loads(json.dumps(settings.to_plain())) == settings.to_plain()


def test_resume_may_change_speed_but_not_the_model_or_data() -> None:
    saved = Settings(out=OUT).to_plain()
    Settings(out=OUT, ranks=4, lr=1.0, steps=999, bf16=True).check_continues(saved, OUT)
    other = Settings(out=OUT, preset="tiny", seed=7)
    with pytest.raises(DemoError, match=r"--preset: saved 'small', now 'tiny'\n  --seed: saved 0"):
        other.check_continues(saved, OUT)


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
    assert (again.last, again.seconds, again.speed) == (1, 0.5, 4096.0)
