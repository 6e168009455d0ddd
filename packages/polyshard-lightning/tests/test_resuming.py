"""A run that was saved and continues is bitwise the run that was not interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="pip install 'polyshard-lightning[lightning]'")

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import Odd, alone, assert_equal, batch, batches, trainer, whole

from polyshard.errors import CheckpointError, UnsupportedError
from polyshard_checkpoint import Checkpoints
from polyshard_lightning import PolyshardStrategy
from polyshard_testing import World, ranks


class ByStep(Odd):
    """Lightning begins an epoch's batches anew: those of a step are these, whatever it gives."""

    def training_step(self, given: torch.Tensor, index: int) -> torch.Tensor:
        return super().training_step(batch(self.global_step, self.global_rank), index)


def train(
    rank: int, size: int, steps: int, path: Path | None = None, file: bool = False
) -> tuple[Odd, Any]:
    module = ByStep()
    strategy = PolyshardStrategy(save_distributed_checkpoint=not file)
    runs = trainer(size, strategy, max_steps=steps)
    runs.fit(module, batches(4, rank), ckpt_path=path)
    return module, runs


@ranks(2)
@pytest.mark.parametrize("file", [False, True], ids=["folder", "file"])
def test_bits_are_those_of_a_run_without_a_break(
    rank: int, size: int, tmp_path: Path, file: bool
) -> None:
    keeper = ModelCheckpoint(tmp_path, "half", save_top_k=-1, every_n_train_steps=2)
    settings: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [keeper]}
    undisturbed = ByStep()
    strategy = PolyshardStrategy(save_distributed_checkpoint=not file)
    trainer(size, strategy, max_steps=3, **settings).fit(undisturbed, batches(4, rank))
    path = tmp_path / "half.ckpt"
    assert path.is_dir() is not file
    second, runs = train(rank, size, 3, path, file=file)
    assert runs.global_step == 3
    assert second.losses == undisturbed.losses[2:]
    expected = whole(undisturbed)
    for name, weight in whole(second).items():
        assert torch.equal(weight, expected[name]), name


def save_half(rank: int, size: int, path: Path) -> None:
    _, runs = train(rank, size, 2)
    runs.save_checkpoint(path)


def go_on(rank: int, size: int, path: Path) -> dict[str, torch.Tensor]:
    module, runs = train(rank, size, 2, path)  # nothing is left to do
    assert runs.global_step == 2
    [optimizer] = runs.optimizers
    steps = {int(state["step"]) for state in optimizer.state.values() if state}
    assert steps == {2}
    return whole(module)


def test_another_number_of_ranks(world2: World, world3: World, tmp_path: Path) -> None:
    path = tmp_path / "two.ckpt"
    world2.run(save_half, path)
    for found in world3.run(go_on, path):
        assert_equal(found, alone(2, 2))


@ranks(2)
def test_files_are_lightnings_own(rank: int, size: int, tmp_path: Path) -> None:
    path = tmp_path / "whole.ckpt"
    module, runs = train(rank, size, 2, file=True)
    runs.save_checkpoint(path)
    loaded = Odd.load_from_checkpoint(path, weights_only=False)
    expected = whole(module)
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight.cpu(), expected[name].cpu()), name


@ranks(2)
def test_a_file_stays_until_the_folder_in_its_place_is_complete(
    rank: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    if rank == 0:
        path.write_text("of another strategy")
    _, runs = train(rank, size, 1)

    def fails(*given: Any) -> None:
        raise CheckpointError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", fails)
        with pytest.raises(CheckpointError, match="the disk is full"):
            runs.save_checkpoint(path)
    assert path.read_text() == "of another strategy"
    runs.save_checkpoint(path)
    assert path.is_dir()
    assert train(rank, size, 1, path)[1].global_step == 1
    assert [found.name for found in tmp_path.iterdir()] == ["last.ckpt"]


class Grouped(ByStep):
    """Biases of one shape in two groups."""

    sizes: tuple[int, int] = (2, 1)

    def configure_optimizers(self) -> Any:
        biases = [p for n, p in self.named_parameters() if n.startswith("blocks") and p.ndim == 1]
        first, _ = self.sizes
        groups: list[dict[str, Any]] = [
            {"params": biases[:first]},
            {"params": biases[first:], "lr": 0.5},
        ]
        return torch.optim.Adam(groups, lr=1e-2)


@ranks(2)
def test_a_file_with_other_groups_is_refused(rank: int, size: int, tmp_path: Path) -> None:
    path = tmp_path / "file.ckpt"
    module = Grouped()
    runs = trainer(size, PolyshardStrategy(save_distributed_checkpoint=False), max_steps=1)
    runs.fit(module, batches(4, rank))
    runs.save_checkpoint(path)
    module = Grouped()
    module.sizes = (1, 2)
    with pytest.raises(CheckpointError, match=r"groups of \[1, 2\] parameters, and had \[2, 1\]"):
        trainer(size, PolyshardStrategy(), max_steps=2).fit(
            module, batches(4, rank), ckpt_path=path
        )


@ranks(2)
def test_model_checkpoint_keeps_the_best(rank: int, size: int, tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, monitor="score", save_top_k=1, save_last=True)
    settings: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [keeper]}
    module = Odd()
    runs = trainer(size, PolyshardStrategy(), max_steps=-1, max_epochs=3, **settings)
    runs.fit(module, batches(2, rank), batches(1, rank))
    runs.strategy.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {
        "last.ckpt", Path(keeper.best_model_path).name
    }  # fmt: skip
    module.seen.clear()
    runs.test(module, batches(1, rank), ckpt_path="best", verbose=False)
    assert len(module.seen) == 1


@ranks(2)
def test_weights_alone_are_loaded_for_evaluation(rank: int, size: int, tmp_path: Path) -> None:
    path = tmp_path / "weights.ckpt"
    trained, runs = train(rank, size, 2)
    runs.save_checkpoint(path, weights_only=True)
    module = Odd()
    trainer(size, PolyshardStrategy()).test(
        module, batches(1, rank), ckpt_path=path, weights_only=False, verbose=False
    )
    expected = whole(trained)
    for name, weight in whole(module).items():
        assert torch.equal(weight, expected[name]), name
    with pytest.raises((CheckpointError, KeyError)):
        train(rank, size, 4, path)


class Adds(Odd):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["mine"] = torch.ones(1)


@ranks(2)
def test_weights_that_a_hook_adds_are_refused(rank: int, size: int, tmp_path: Path) -> None:
    module = Adds()
    runs = trainer(size, PolyshardStrategy(), max_steps=1)
    runs.fit(module, batches(1, rank))
    with pytest.raises(UnsupportedError, match="'mine'"):
        runs.save_checkpoint(tmp_path / "added.ckpt")


class Averages(Odd):
    """Saves weights other than its own, which differ on one rank alone."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 1:
            checkpoint["state_dict"]["head.weight"] = checkpoint["state_dict"]["head.weight"] * 2


@ranks(2)
def test_weights_that_a_hook_changes_are_refused(rank: int, size: int, tmp_path: Path) -> None:
    module = Averages()
    runs = trainer(size, PolyshardStrategy(), max_steps=1)
    runs.fit(module, batches(1, rank))
    with pytest.raises(UnsupportedError, match=r"'head\.weight'"):
        runs.save_checkpoint(tmp_path / "changed.ckpt")


@ranks(2)
def test_the_best_weights_alone_are_tested_after_training(
    rank: int, size: int, tmp_path: Path
) -> None:
    keeper = ModelCheckpoint(tmp_path, monitor="score", save_weights_only=True)
    settings: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [keeper]}
    module = Odd()
    runs = trainer(size, PolyshardStrategy(), max_steps=2, **settings)
    runs.fit(module, batches(2, rank), batches(1, rank))
    expected = module.seen[-1]
    module.seen.clear()
    runs.test(module, batches(1, rank), ckpt_path="best", verbose=False)
    assert module.seen == [pytest.approx(expected)]


@ranks(2)
def test_a_damaged_checkpoint_is_refused_on_every_rank(
    rank: int, size: int, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.ckpt"
    _, runs = train(rank, size, 1)
    runs.save_checkpoint(path)
    runs.strategy.barrier()
    if rank == 0:
        largest = max(path.rglob("*.distcp"), key=lambda file: file.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    runs.strategy.barrier()
    with pytest.raises(CheckpointError, match="damaged"):
        train(rank, size, 2, path)
