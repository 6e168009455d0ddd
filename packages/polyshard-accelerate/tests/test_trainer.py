"""``Trainer.train`` with polyshard: losses of one process; a resumed run continues bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="pip install 'polyshard-accelerate[transformers]'")
pytest.importorskip("transformers", reason="pip install 'polyshard-accelerate[transformers]'")

import torch
import torch.distributed as dist
from accelerate_runs import as_launched, assert_same_bits, whole
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import polyshard
from polyshard.errors import CheckpointError, UnsupportedError
from polyshard_accelerate import PolyshardAccelerator, PolyshardTrainer, Sharding
from polyshard_testing import World, ranks

STEPS = 4
ROWS = 2  # of a batch, on each rank


class Losses(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.norms: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.values.append(logs["loss"])
            self.norms.append(float(logs["grad_norm"]))


def tiny() -> LlamaForCausalLM:
    """A Llama with an uneven width, tied embeddings, and a frozen layer."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "hidden_size": 12, "intermediate_size": 25, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 33,
        "max_position_embeddings": 8, "attn_implementation": "eager", "tie_word_embeddings": True,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.model.layers[0].mlp.requires_grad_(False)
    return model


def data() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(33, (64, 8), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(
    folder: Path,
    kind: type[Trainer] = PolyshardTrainer,
    more: Any = None,
    model: Any = None,
    **settings: Any,
) -> tuple[Any, Losses]:
    losses = Losses()
    given: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,  # rows are on the ranks' device
        "use_cpu": torch.get_default_device().type == "cpu",
    }
    made = kind(
        model=tiny() if model is None else model,
        args=TrainingArguments(str(folder), **(given | settings)),
        train_dataset=data(),
        eval_dataset=data()[:6],
        callbacks=[losses],
        **(more or {}),
    )
    return made, losses


def in_ranks(rank: int, size: int, folder: Path) -> tuple[list[float], list[float]]:
    as_launched(rank, size)
    made, losses = trainer(folder)
    made.train()
    assert {one.reductions for one in polyshard.stats(made.model).groups.values()} <= {0, STEPS}
    return losses.values, losses.norms


def in_one(rank: int, size: int, folder: Path) -> tuple[list[float], list[float]]:
    """The same rows in each step, by a plain Trainer."""
    as_launched(0, 1)
    made, losses = trainer(folder, Trainer, per_device_train_batch_size=2 * ROWS)
    made.train()
    return losses.values, losses.norms


def test_losses_and_norms_are_those_of_one_process(
    world1: World, world2: World, tmp_path: Path
) -> None:
    [expected] = world1.run(in_one, tmp_path)
    for found in world2.run(in_ranks, tmp_path):
        assert found[0] == pytest.approx(expected[0], rel=1e-4)
        assert found[1] == pytest.approx(expected[1], rel=1e-4)
    assert max(expected[1]) > 0.5, "nothing was clipped"


@ranks(2)
def test_resumed_losses_are_those_of_a_run_without_a_break(
    rank: int, size: int, tmp_path: Path
) -> None:
    as_launched(rank, size)
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    undisturbed, expected = trainer(tmp_path, **saving)
    undisturbed.train()
    weights = whole(undisturbed.model)
    again, losses = trainer(tmp_path, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses.values == expected.values[2:]
    assert_same_bits(whole(again.model), weights)


def save(rank: int, size: int, folder: Path) -> dict[str, torch.Tensor]:
    as_launched(rank, size)
    made, _ = trainer(folder, save_strategy="steps", save_steps=2, max_steps=2)
    made.train()
    return whole(made.model)


class Begun(TrainerCallback):
    """What training begins with."""

    weights: dict[str, torch.Tensor]
    steps: tuple[int, int]

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.weights = {n: w.clone() for n, w in whole(given["model"]).items()}
        self.steps = state.global_step, given["lr_scheduler"].last_epoch


def load(rank: int, size: int, folder: Path) -> dict[str, torch.Tensor]:
    as_launched(rank, size)
    begun = Begun()
    made, _ = trainer(folder, max_steps=3)
    made.add_callback(begun)
    made.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert begun.steps == (2, 2)
    assert {int(s["step"]) for s in made.optimizer.state.values()} == {3}
    return begun.weights


def test_another_number_of_ranks(world2: World, world3: World, tmp_path: Path) -> None:
    expected, _ = world2.run(save, tmp_path)
    for found in world3.run(load, tmp_path):
        assert_same_bits(found, expected)


@ranks(2)
def test_saved_models_are_those_of_transformers(rank: int, size: int, tmp_path: Path) -> None:
    as_launched(rank, size)
    made, _ = trainer(tmp_path, max_steps=1)
    made.train()
    made.save_model(str(tmp_path / "model"))
    dist.barrier()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    expected = whole(made.model)
    assert_same_bits(dict(loaded.named_parameters()), expected)


@ranks(2)
@pytest.mark.parametrize("only", [False, True], ids=["whole", "weights only"])
def test_the_best_model_is_loaded_at_the_end(
    rank: int, size: int, tmp_path: Path, only: bool
) -> None:
    as_launched(rank, size)
    settings: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1,
        "load_best_model_at_end": True, "learning_rate": 3.0, "save_only_model": only,
    }  # fmt: skip
    made, _ = trainer(tmp_path, max_steps=2, **settings)
    before = made.evaluate()["eval_loss"]
    made.train()
    scores = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    assert before != min(scores)
    assert made.evaluate()["eval_loss"] == pytest.approx(min(scores), rel=1e-5)


@ranks(2)
def test_units_plugins_and_an_optimizer_of_ones_own(rank: int, size: int, tmp_path: Path) -> None:
    as_launched(rank, size)
    model = tiny()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    sharding = Sharding(units=["model.layers.*/2"], flat=True)
    made: Any = PolyshardTrainer(
        model=model,
        args=TrainingArguments(
            str(tmp_path),
            max_steps=2,
            save_strategy="no",
            report_to=[],
            dataloader_pin_memory=False,
            use_cpu=torch.get_default_device().type == "cpu",
            disable_tqdm=True,
        ),
        train_dataset=data(),
        optimizers=(optimizer, None),
        sharding=sharding,
    )
    before = whole(made.model)
    made.train()
    groups = {group.name.partition("#")[0] for group in polyshard.describe(made.model).groups}
    assert groups == {"(root)", "model.layers.0"}
    changed = {n for n, w in whole(made.model).items() if not torch.equal(w, before[n])}
    assert changed == {n for n, p in made.model.named_parameters() if p.requires_grad}


@ranks(2)
def test_what_was_evaluated_before_is_trained(rank: int, size: int, tmp_path: Path) -> None:
    as_launched(rank, size)
    sharding = Sharding(reshard_after_forward=False)  # gathered still, when training begins
    made, _ = trainer(tmp_path, more={"sharding": sharding}, max_steps=1)
    before = whole(made.model)
    made.evaluate()
    made.train()
    changed = {n for n, w in whole(made.model).items() if not torch.equal(w, before[n])}
    assert changed == {n for n, p in made.model.named_parameters() if p.requires_grad}


def on_meta(folder: Path) -> LlamaForCausalLM:
    """The model that :func:`tiny` saved in ``folder``, without its values."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    model.model.layers[0].mlp.requires_grad_(False)
    return model


@ranks(2, 3)
def test_a_folder_fills_a_model_on_meta(rank: int, size: int, tmp_path: Path) -> None:
    as_launched(rank, size)
    base = tmp_path / "base"
    if rank == 0:
        tiny().save_pretrained(base)
    dist.barrier()
    filled, losses = trainer(
        tmp_path, model=on_meta(base), more={"sharding": Sharding(pretrained=base)}
    )
    filled.train()
    as_launched(rank, size)
    plain, expected = trainer(tmp_path)
    plain.train()
    assert losses.values == pytest.approx(expected.values, rel=1e-6)
    trained = whole(filled.model)
    assert_close(trained, whole(plain.model))
    filled.save_model(str(tmp_path / "out"))
    dist.barrier()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert_same_bits(dict(loaded.named_parameters()), trained)


@ranks(2)
def test_a_model_that_a_folder_fills_goes_on_from_a_checkpoints_weights(
    rank: int, size: int, tmp_path: Path
) -> None:
    """The checkpoint has no more than weights, as one of a stock Trainer has for this one."""
    as_launched(rank, size)
    base = tmp_path / "base"
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    if rank == 0:
        tiny().save_pretrained(base)
    trainer(tmp_path, max_steps=2, **saving)[0].train()
    dist.barrier()
    as_launched(rank, size)
    checkpoint = tmp_path / "checkpoint-2"
    begun, sharding = Begun(), Sharding(pretrained=base)
    made, _ = trainer(tmp_path, model=on_meta(base), more={"sharding": sharding}, max_steps=3)
    made.add_callback(begun)
    made.train(resume_from_checkpoint=str(checkpoint))
    saved = LlamaForCausalLM.from_pretrained(checkpoint)
    assert_same_bits(begun.weights, dict(saved.named_parameters()))
    assert begun.steps[0] == 2


class Saves(torch.nn.Linear):
    """A model that a hub's mixin saves, and nothing of transformers."""

    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(  # type: ignore[override]
        self, input_ids: torch.Tensor, labels: Any = None
    ) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(input_ids[:, :3].float()).square().mean()}

    def save_pretrained(self, folder: str) -> None:
        raise AssertionError("of whole weights, which there are none of here")


@ranks(2)
def test_other_models_that_save_themselves_are_gathered(
    rank: int, size: int, tmp_path: Path
) -> None:
    as_launched(rank, size)
    model = Saves()
    settings: dict[str, Any] = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    made, _ = trainer(tmp_path, model=model, **settings)
    made.train()
    dist.barrier()
    saved = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert_same_bits(saved, whole(made.model))


class Templates:
    """What is saved beside a model, some of it in a folder, as of a tokenizer with templates."""

    def __init__(self) -> None:
        self.saves = 0

    def save_pretrained(self, folder: str) -> None:
        self.saves += 1
        place = Path(folder, "templates", "of")
        place.mkdir(parents=True)
        (place / "a.jinja").write_text(str(self.saves))


@ranks(2)
def test_folders_beside_a_model_are_replaced(rank: int, size: int, tmp_path: Path) -> None:
    as_launched(rank, size)
    made, _ = trainer(tmp_path, max_steps=1)
    made.train()
    made.processing_class = made.data_collator.tokenizer = Templates()
    for _ in range(3):
        made.save_model(str(tmp_path / "out"))
    dist.barrier()
    files = [path.name for path in (tmp_path / "out" / "templates" / "of").iterdir()]
    assert files == ["a.jinja"]
    assert (tmp_path / "out" / "templates" / "of" / "a.jinja").read_text() == "3"


@ranks(2)
def test_flat_optimizers_train_again(rank: int, size: int, tmp_path: Path) -> None:
    as_launched(rank, size)
    made, losses = trainer(tmp_path, more={"sharding": Sharding(flat=True)}, max_steps=2)
    made.train()
    made.train()
    assert len(losses.values) == 4


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """But for rounding: shards lie elsewhere in memory, and sums of squares follow that."""
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@ranks(2)
def test_a_folder_that_does_not_fit(rank: int, size: int, tmp_path: Path) -> None:
    as_launched(rank, size)
    made, _ = trainer(
        tmp_path, model=tiny(), more={"sharding": Sharding(pretrained=tmp_path / "none")}
    )
    with pytest.raises(CheckpointError, match="there is no"):
        made.train()


@ranks(2)
def test_accelerate_fills_models_prepared_after_their_optimizers(
    rank: int, size: int, tmp_path: Path
) -> None:
    as_launched(rank, size)
    if rank == 0:
        tiny().save_pretrained(tmp_path)
    dist.barrier()
    found = []
    for model, sharding in (
        (on_meta(tmp_path), Sharding(pretrained=tmp_path, flat=True)),
        (tiny(), Sharding(flat=True)),
    ):
        as_launched(rank, size)
        accelerator = PolyshardAccelerator(sharding=sharding, cpu=True)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained, lr=1e-2)
        optimizer, prepared = accelerator.prepare(optimizer, model)
        assert_same_bits(whole(prepared), dict(tiny().named_parameters()))
        for row in data()[rank : 4 * size : size]:
            batch = {name: value[None] for name, value in row.items()}
            accelerator.backward(prepared(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(prepared))
    assert_close(*found)


@ranks(2)
def test_other_engines_are_refused(rank: int, size: int, tmp_path: Path) -> None:
    as_launched(rank, size)
    with pytest.raises(UnsupportedError, match="which would shard as well"):
        trainer(tmp_path, fsdp="full_shard", fsdp_config={"fsdp_version": 2})
