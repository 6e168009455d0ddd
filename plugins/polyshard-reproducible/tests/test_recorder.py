"""What a recorder sees, and what it leaves alone."""

from __future__ import annotations

import gc
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from reproducible_runs import Run, loss_of, samples
from torch import Tensor, nn

from polyshard import fully_shard
from polyshard_reproducible import Recorder, Reproducible, ReproducibleError, compare
from polyshard_reproducible.comparing import Difference
from polyshard_reproducible.records import PHASES, read_run
from polyshard_testing import ranks


def record(folder: str | Path, steps: range = range(2), change: Any = None, **given: Any) -> Run:
    """A run of one rank; ``change`` does something to it before it starts."""
    run = Run((1,), slots=2, **given)
    if change is not None:
        change(run)
    with Recorder(folder, run.plugin, run.model, run.optimizer):
        run.train(steps)
    return run


def first_of(change: Any) -> Difference:
    """Where a changed run differs first from a plain one."""
    with tempfile.TemporaryDirectory() as folder:
        record(f"{folder}/plain")
        record(f"{folder}/changed", change=change)
        found = compare(f"{folder}/plain", f"{folder}/changed").first
    assert found is not None
    return found


def at_second_step(action: Any) -> Any:
    def change(run: Run) -> None:
        run.after_backward = lambda step: action(run) if step == 1 else None

    return change


def touch(tensor: Tensor | None) -> None:
    if tensor is None:
        return  # sums are there after the last slot
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    with torch.no_grad():
        local.view(-1).view(torch.int32)[-1] ^= 1


def other_data(run: Run) -> None:
    run.sampler._seed += 1


def other_block(run: Run) -> None:
    """A block that computes something else; its input is the same."""
    run.model.blocks[1].register_forward_hook(lambda module, args, output: output * 1.0001)


def other_optimizer(run: Run) -> None:
    run.optimizer.param_groups[0]["betas"] = (0.8, 0.999)


def other_clipping(run: Run) -> None:
    """Something between the sums and the optimizer."""
    run.optimizer.register_step_pre_hook(lambda *_: touch(run.model.blocks[0].up.weight.grad))


@ranks(1)
def test_the_first_phase_that_differs_is_named(rank: int, size: int) -> None:
    cases = [
        (other_data, (0, "activations", "(root)", "input 0", 0)),
        (other_block, (0, "activations", "blocks.1", "output 0", 0)),
        (other_clipping, (0, "stepped gradients", "blocks.0", "blocks.0.up.weight", None)),
        (other_optimizer, (0, "optimizer state", "(root)", "scale: exp_avg", None)),
        (
            at_second_step(lambda run: touch(run.model.head.weight.grad)),
            (1, "gradients", "(root)", "head.weight", None),
        ),
        (
            lambda run: touch(run.model.blocks[0].norm.bias),
            (0, "parameters", "blocks.0", "blocks.0.norm.bias", None),
        ),
    ]
    for change, expected in cases:
        found = first_of(change)
        assert (found.step, *found.key) == expected


@ranks(1)
def test_nothing_of_the_run_changes(rank: int, size: int) -> None:
    plain = Run((1,), slots=2).train(range(2)).state()
    with tempfile.TemporaryDirectory() as folder:
        run = record(folder)
        assert run.state() == plain
        before = {p.name: p.read_bytes() for p in Path(folder).iterdir()}
        run.train(range(2, 3))  # recorded no longer
        assert {p.name: p.read_bytes() for p in Path(folder).iterdir()} == before
        assert list(read_run(Path(folder)).steps) == [0, 1, 2]


class Returns(nn.Module):
    """Returns what a function makes of its input, beside it."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.up, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        return self.up(x), self.make(x)


@ranks(1)
def test_what_has_no_dense_memory_is_left_out(rank: int, size: int) -> None:
    kinds: list[Any] = [
        Tensor.to_sparse,
        Tensor.to_sparse_csr,
        lambda x: torch.nested.nested_tensor([x, x[:1]]),
        lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: torch.empty_like(x, device="meta"),
    ]
    for kind in kinds:
        plugin = Reproducible(slots=1)
        model: Any = fully_shard(Returns(kind), plugins=[plugin])
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")  # torch's own, of what is a prototype or deprecated
            with Recorder(folder, plugin, model):
                for _ in plugin.each_slot(model, step=0):
                    model(torch.ones(3, 4), kind(torch.ones(3, 4)))[0].sum().backward()
            (step,) = read_run(Path(folder)).steps.values()
        assert [key.name for key in step if key.phase == "activations"] == ["input 0", "output 0"]


@ranks(1)
def test_only_what_slots_compute_is_recorded(rank: int, size: int) -> None:
    """An evaluation between steps, which leaves weights gathered, and a step that is made again."""
    given: dict[str, Any] = {"dtype": torch.bfloat16, "reshard_after_forward": False}
    with tempfile.TemporaryDirectory() as folder:
        record(f"{folder}/plain", range(3), **given)
        run = Run((1,), slots=2, **given)
        with Recorder(f"{folder}/other", run.plugin, run.model, run.optimizer):
            run.train(range(1))
            with torch.no_grad():
                loss_of(run.model, samples()[:5])
            for _ in run.plugin.each_slot(run.model, step=1):
                loss_of(run.model, samples()[:3])
                break
            run.train(range(1, 3))
        found = compare(f"{folder}/plain", f"{folder}/other")
        assert found.first is None
        assert found.steps == (0, 1, 2, 3)


@ranks(1)
def test_a_crash_leaves_what_was_stepped(rank: int, size: int) -> None:
    run = Run((1,), slots=2)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(folder, run.plugin, run.model, run.optimizer)
        run.train(range(2))
        steps = read_run(Path(folder)).steps  # not closed
        assert list(steps) == [0, 1]
        assert {key.phase for key in steps[1]} == set(PHASES)
        recorder.close()
        recorder.close()
        assert list(read_run(Path(folder)).steps) == [0, 1, 2]  # of the last, parameters


@ranks(1)
def test_old_records_of_the_same_start_are_gone_before_ranks_meet(rank: int, size: int) -> None:
    """Else those of a rank that dies in the first step would be added to new ones of others."""
    with tempfile.TemporaryDirectory() as folder:
        record(folder, range(3))
        run = Run((1,), slots=2)
        with Recorder(folder, run.plugin, run.model, run.optimizer):
            for _ in run.plugin.each_slot(run.model, step=0):
                assert list(read_run(Path(folder)).steps) == []
                break


def break_down(step: int) -> None:
    if step == 1:
        raise RuntimeError("broken")


@ranks(1)
def test_of_a_step_that_failed_nothing_is_written(rank: int, size: int) -> None:
    run = Run((1,), slots=2)
    run.after_backward = break_down
    with tempfile.TemporaryDirectory() as folder:
        with (
            pytest.raises(RuntimeError, match="broken"),
            Recorder(folder, run.plugin, run.model, run.optimizer),
        ):
            run.train(range(3))
        assert list(read_run(Path(folder)).steps) == [0]


@ranks(1)
def test_models_are_let_go(rank: int, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run((1,), slots=2)
        Recorder(folder, run.plugin, run.model, run.optimizer)
        run.train(range(1))
        plugin, model = run.plugin, weakref.ref(run.model)
        del run
        gc.collect()
        assert model() is None
        assert not plugin._known.watchers


class Twice(nn.Module):
    """Calls a sharded layer twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.layer(x))
        return out


@ranks(1)
def test_calls_are_counted_and_weights_kept_out(rank: int, size: int) -> None:
    plugin, model = Reproducible(slots=1), Twice()
    fully_shard(model.layer, plugins=[plugin])
    fully_shard(model, plugins=[plugin])
    with tempfile.TemporaryDirectory() as folder:
        with Recorder(folder, plugin, model):  # no optimizer: a step ends where the next begins
            for step in range(2):
                for _ in plugin.each_slot(model, step=step):
                    model(torch.ones(2, 4)).sum().backward()
        steps = read_run(Path(folder)).steps
    assert list(steps) == [0, 1]
    seen = [(k.group, k.name) for k in steps[1] if k.phase == "activations"]
    layer = [("layer", "output 0"), ("layer", "output 0 of call 2")]
    assert seen == [("(root)", "input 0"), *layer, ("(root)", "output 0")]


@ranks(1)
def test_other_models_are_refused(rank: int, size: int) -> None:
    model = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ReproducibleError, match="1 of the 1 groups of this model were not given"):
        Recorder("nowhere", Reproducible(), model)
    assert not Path("nowhere").exists()
