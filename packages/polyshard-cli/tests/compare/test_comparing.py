"""Real ranks of every engine: losses, bytes, and engines that fail."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import compare_jobs
import pytest
import torch

from polyshard_cli.compare import Comparison, JobError, Result, Settings, compare
from polyshard_cli.compare.engines.built import Place
from polyshard_cli.compare.engines.spec import parse
from polyshard_cli.compare.job.loading import built, draw_from
from polyshard_cli.compare.training.session import Session

KIB = 1 << 10
FRAMES = 1.25
"""What gloo puts around messages of a few KiB, at most."""


def compared(job: str, *engines: str, **given: object) -> dict[str, Result]:
    return results(document(job, *engines, **given))


def document(job: str, *engines: str, **given: object) -> Comparison:
    chosen: dict[str, object] = {"steps": 3, "warmup": 1, "device": "cpu", "timeout": 120, **given}
    return compare(Settings(job=f"compare_jobs:{job}", engines=engines, **chosen))  # type: ignore[arg-type]


def results(found: Comparison) -> dict[str, Result]:
    failed = {result.name: result.error for result in found.results if result.error}
    assert not failed
    return {result.name: result for result in found.results}


def losses_of(result: Result) -> tuple[float, ...]:
    assert result.losses is not None
    return result.losses.steps


def alone(steps: int, ranks: int) -> list[float]:
    """The losses of ``compare_jobs.linear``, trained by hand on the batches of all ranks at once.

    Batches are of one size, so the mean over them is the mean over ranks.
    """
    settings = Settings()
    job = built(settings, compare_jobs.linear)
    optimizer = job.optimizer(job.model)
    found = []
    for step in range(steps):
        batches = []
        for rank in range(ranks):
            draw_from(settings.seed, "batch", step, rank)
            batches.append(job.batch(step, rank, ranks))
        loss = job.loss(job.model, torch.cat(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_losses_and_bytes_are_those_by_hand() -> None:
    found = compared("linear", "polyshard", "fsdp2", "fsdp1", "ddp", "single")
    expected = alone(4, 2)
    for result in found.values():
        assert losses_of(result) == pytest.approx(expected, rel=1e-6), result.name
    ours, theirs = found["polyshard"], found["fsdp2"]
    assert theirs.losses is not None
    assert theirs.losses.bitwise
    # A root stays gathered: half of 16 KiB to gather, half to reduce, from each of two ranks.
    assert ours.counted_bytes == (16 * KIB, 16 * KIB)
    assert theirs.counted_bytes is None
    assert found["single"].counted_bytes == (0,)
    if ours.wire_bytes is not None:
        # DDP's ring over two ranks sends half of all gradients twice.
        for result in (ours, found["ddp"]):
            assert result.wire_bytes is not None
            assert all(16 * KIB <= sent <= FRAMES * 16 * KIB for sent in result.wire_bytes)
        assert found["single"].wire_bytes == (0,)


def test_uneven_frozen_dropout_and_units() -> None:
    found = document("tower", "polyshard", "fsdp2", "polyshard+keep", "single")
    (ours, theirs, kept, single) = results(found).values()
    assert found.job is not None
    assert (found.job.units, found.job.parameters - found.job.trainable) == (4, 33 * 34)
    for other in (theirs, kept):
        assert other.losses is not None
        assert other.losses.bitwise
    # The order of sums differs; dropout does not.
    assert losses_of(single) == pytest.approx(losses_of(ours), rel=1e-6)
    assert ours.counted_bytes is not None
    assert kept.counted_bytes is not None
    # What is gathered again in backward: 17 of 33 rows of three layers, packed with some padding.
    again = 3 * (17 * 33 + 17) * 4
    for freed, held in zip(ours.counted_bytes, kept.counted_bytes, strict=True):
        assert again <= freed - held < 1.05 * again


@pytest.mark.skipif(
    find_spec("polyshard_quantized") is None or find_spec("polyshard_offload") is None,
    reason="needs polyshard-quantized and polyshard-offload",
)
def test_stacks_of_plugins() -> None:
    found = compared("wide", "polyshard", "polyshard+int8", "polyshard+offload-optimizer+flat")
    plain, quantized, offloaded = found.values()
    assert plain.counted_bytes is not None
    assert quantized.counted_bytes is not None
    assert max(quantized.counted_bytes) < 0.5 * min(plain.counted_bytes)
    assert quantized.losses is not None
    assert offloaded.losses is not None
    assert quantized.plan is not None
    assert "gather codec quantized" in quantized.plan
    assert 0 < quantized.losses.largest_difference < 1e-2
    assert not quantized.losses.bitwise
    assert offloaded.losses.bitwise


def test_replicas_on_four_ranks() -> None:
    found = compared("linear", "polyshard+hsdp=2", "fsdp2+hsdp=2", ranks=4, steps=1)
    for result in found.values():
        assert losses_of(result) == pytest.approx(alone(2, 4), rel=1e-6), result.name
    # Shards over two ranks; sums over replicas are not in what the engine counts.
    assert found["polyshard+hsdp=2"].counted_bytes == (16 * KIB,) * 4


def test_one_after_the_other_is_the_same_training() -> None:
    turns = compared("tower", "polyshard", "ddp")
    apart = compared("tower", "polyshard", "ddp", sequential=True)
    for name, result in apart.items():
        assert losses_of(result) == losses_of(turns[name])
        assert result.timing is not None
        assert result.timing.paired_ratio is None


def test_engines_that_fail_are_rows_and_others_go_on() -> None:
    found = document("trouble", "fsdp1", "polyshard", "fsdp2", "ddp", "single")
    assert found.reference == "polyshard"
    raised, fine, killed, left, single = found.results
    assert fine.error is None
    assert losses_of(single) == pytest.approx(losses_of(fine), rel=1e-6)
    errors = [result.error for result in (raised, killed, left)]
    assert all(error is not None and error.rank == 1 for error in errors)
    told = [error.message for error in errors if error is not None]
    assert told[0] == "ArithmeticError: of its own in two lines"
    assert told[1].startswith("it was killed by SIGKILL")
    assert told[2] == "it ended with exit code 7 and without an error; it last printed: so long"
    assert [error.step for error in errors if error is not None] == [0, 0, 1]
    assert raised.error is not None
    assert "in troubled" in raised.error.details


def test_an_engine_that_hangs_is_a_row() -> None:
    for timeout in (3, 12, 48):  # a busy machine may take longer than that to build the model
        (hung,) = document("hangs", "single", timeout=timeout).results
        assert hung.error is not None
        assert hung.error.message == f"rank 0 did not answer within {timeout} s (--timeout)"
        if hung.error.step is not None:
            break
    assert hung.error is not None
    assert hung.error.step == 0


def test_models_of_the_meta_device_have_one_set_of_values() -> None:
    found = compared("on_meta", "polyshard", "fsdp2", "single", steps=1)
    assert found["fsdp2"].losses is not None
    assert found["fsdp2"].losses.bitwise
    assert losses_of(found["single"]) == pytest.approx(losses_of(found["polyshard"]), rel=1e-6)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ("raising", "build() raised RuntimeError: the script's own trouble"),
        ("nothing", "build() returned a NoneType; build() returns (model, batch, loss) or"),
        ("pair", "build() returned a tuple of 2"),
        ("no_module", "the model is a str; it must be a torch.nn.Module"),
        ("no_parameters", "ReLU has no parameter to train"),
        ("no_function", "batch is a list; it must be a function"),
        ("bad_batch", "batch(step=0, rank=0, ranks=1) raised IndexError: no batch 0 for 0 of 1"),
        ("bad_loss", "returned (4, 3); it must return one number"),
        ("bad_optimizer", "optimizer returned a Linear"),
        ("bad_units", "the nearest is layers"),
        ("on_meta_without_values", "the root (Tower) has no reset_parameters()"),
    ],
)
def test_a_bad_job_is_one_error(job: str, expected: str) -> None:
    settings = Settings(job=f"compare_jobs:{job}", ranks=1)
    (spec,) = parse(["single"], 1)
    with pytest.raises(JobError) as caught:
        Session(settings, spec, Place(0, 1, torch.device("cpu"))).step(0)
    assert expected in str(caught.value)


def test_a_job_that_fails_on_ranks_is_an_error() -> None:
    with pytest.raises(JobError, match=r"raised IndexError: no batch 0 for [01] of 2"):
        document("bad_batch", "polyshard")


def test_the_end_of_a_jobs_file_is_not_that_of_the_pipe() -> None:
    found = document("ended", "single", ranks=1)
    (result,) = found.results
    assert result.error is not None
    assert result.error.message == "EOFError: no more lines"


def test_initial_weights_that_differ_are_an_error() -> None:
    with pytest.raises(JobError, match="weight begins with other values than before"):
        document("unseeded", "polyshard", "single")


@pytest.mark.gpu
def test_on_an_accelerator() -> None:
    settings = Settings(
        job="compare_jobs:tower", engines=("polyshard", "fsdp2", "single"), steps=2, ranks=1
    )
    found = results(compare(replace(settings, device="cuda")))
    assert found["fsdp2"].losses is not None
    assert found["fsdp2"].losses.bitwise
    assert all(result.peak_bytes > 0 for result in found.values())
