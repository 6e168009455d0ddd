"""A search says of each setting what a plan of it alone says, and always the same."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from polyshard_cli.plan import Open, PlanError, Settings, draft, parse_mesh, tune
from polyshard_cli.plan.drafting import subject_of
from polyshard_cli.plan.tuning import search as searching
from polyshard_cli.plan.tuning.search import Choice, Search, space_of, with_batch
from polyshard_cli.plan.tuning.tune import differences, parts_of

UNEVEN = Settings(
    model="plan_models:uneven", mesh=parse_mesh("dp=4"), batch=8, sequence=16, backend="gloo"
)
UNITS = [(), ("blocks.*/2",), ("blocks.*.attention", "blocks.*.feed_forward", "head"), ("none",)]
NO_TP = Open(keep=frozenset({"tp"}))


def check(choice: Choice, settings: Settings = UNEVEN) -> None:
    found = Search(settings, subject_of(settings)).one(choice)
    document = draft(choice.applied(settings))
    assert found.needs.memory == document.memory
    assert found.needs.timing == document.timing
    assert found.sent_bytes == sum(transfer.sent_bytes for transfer in document.traffic)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("units", UNITS, ids=" ".join)
@pytest.mark.parametrize("reshard", [None, True, False, 2])
def test_units_and_resharding_are_those_of_a_plan(
    units: tuple[str, ...], reshard: bool | int | None
) -> None:
    check(Choice(parse_mesh("dp=4"), units, reshard))


@pytest.mark.parametrize("mesh", ["dp=1,replicate=4", "replicate=2,dp=2"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_meshes_are_those_of_a_plan(mesh: str, backend: str) -> None:
    settings = replace(UNEVEN, backend=backend, bf16=True)  # type: ignore[arg-type]
    for reshard in (None, False):
        check(Choice(parse_mesh(mesh), reshard=reshard), settings)


@pytest.mark.parametrize("reshard", [2, 4, 8])
def test_blocks_over_nccl_are_those_of_a_plan(reshard: int) -> None:
    mesh = parse_mesh("dp=8")
    check(Choice(mesh, reshard=reshard), replace(UNEVEN, mesh=mesh, backend="nccl"))


@pytest.mark.skipif(find_spec("polyshard_quantized") is None, reason="needs polyshard-quantized")
@pytest.mark.parametrize("reshard", [None, False, 2])
def test_codecs_are_those_of_a_plan(reshard: bool | int | None) -> None:
    check(Choice(parse_mesh("dp=4"), reshard=reshard, quantize="int8"))


@pytest.mark.skipif(find_spec("polyshard_offload") is None, reason="needs polyshard-offload")
@pytest.mark.parametrize("offload", ["params=host", "optimizer=host,fraction=0.5"])
def test_tiers_are_those_of_a_plan(offload: str) -> None:
    check(Choice(parse_mesh("dp=4"), offload=offload))


@pytest.mark.skipif(
    find_spec("polyshard_tensor_parallel") is None, reason="needs polyshard-tensor-parallel"
)
def test_tensor_parallelism_is_that_of_a_plan_and_its_parts_add_up() -> None:
    settings = Settings(model="demo:tiny", mesh=parse_mesh("dp=4"), batch=4)
    tables = ("blocks.*", "embedding", "head")
    for units in ((), tables):
        choice = Choice(parse_mesh("dp=2,tp=2"), units)
        check(choice, settings)
        found = Search(settings, subject_of(settings)).one(choice)
        assert found.needs.timing is not None
        assert sum(parts_of(found.needs.timing).values()) == pytest.approx(found.seconds)


def test_a_search_is_the_same_every_time() -> None:
    first, second = (tune(UNEVEN, NO_TP, 1 << 40).to_json() for _ in range(2))
    assert first == second


def test_by_rounds_it_finds_what_all_combinations_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tune(UNEVEN, NO_TP, 1 << 40)
    assert whole.is_exhaustive
    monkeypatch.setattr(searching, "MOST_UNITS", 0)
    rounds = tune(UNEVEN, NO_TP, 1 << 40)
    assert not rounds.is_exhaustive
    # This mesh has as many sizes as a second round keeps: nothing is left out, nothing is twice.
    assert rounds.tried == whole.tried
    assert (rounds.best.seconds, rounds.best.memory_bytes) == (
        whole.best.seconds,
        whole.best.memory_bytes,
    )


def test_blocks_that_do_not_divide_are_refused() -> None:
    settings = with_batch(UNEVEN)
    search = Search(settings, subject_of(settings))
    with pytest.raises(PlanError, match=r"--reshard 4 must divide the shard axis' 2 ranks"):
        search.one(Choice(parse_mesh("replicate=2,dp=2"), reshard=4))


def test_a_batch_is_made_for_micro_batches_too() -> None:
    assert with_batch(Settings(mesh=parse_mesh("dp=2"), accumulate=3)).batch == 6


def test_why_the_runner_up_lost_adds_up() -> None:
    settings = with_batch(UNEVEN)
    subject = subject_of(settings)
    found = Search(settings, subject).over(space_of(settings, subject, NO_TP), 0)
    best, other = found.tried[0], found.tried[-1]
    total = sum(difference.seconds for difference in differences(best, other))
    assert total == pytest.approx(other.seconds - best.seconds)
    result = tune(UNEVEN, NO_TP)
    assert result.runner_up is not None
    slower = result.runner_up.point.seconds - result.best.seconds
    assert slower >= 0
    assert sum(d.seconds for d in result.runner_up.differences) == pytest.approx(slower)


def test_the_budget_decides() -> None:
    free = tune(UNEVEN, NO_TP, 1 << 40)
    smallest = free.front[-1]
    tight = tune(UNEVEN, NO_TP, smallest.memory_bytes)
    assert tight.best.name == smallest.name
    assert tight.fitting < free.fitting == tight.tried
    assert [point.fits for point in tight.front] == [False] * (len(tight.front) - 1) + [True]
    with pytest.raises(PlanError) as caught:
        tune(UNEVEN, NO_TP, smallest.memory_bytes - 1)
    assert smallest.name in str(caught.value)
    assert f"none of {free.tried} settings fits" in str(caught.value)


def test_a_model_that_does_not_run_cannot_be_tuned() -> None:
    with pytest.raises(PlanError, match=r"none of \d+ settings works.*--inputs"):
        tune(Settings(model="plan_models:Pair", mesh=parse_mesh("dp=2")), NO_TP)
