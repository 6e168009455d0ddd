"""Recorded runs: what differs first is named, whatever the numbers of ranks."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from reproducible_runs import Run
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

import polyshard_optimizers
from polyshard_reproducible import Recorder, compare
from polyshard_reproducible.command import bisect
from polyshard_reproducible.picture import cells
from polyshard_reproducible.records import PHASES
from polyshard_testing import World

SLOTS = 4
STEPS = 19
FLIPPED = "blocks.1.up.weight"
FLIPPED_AT = 17


def recorded(
    rank: int,
    size: int,
    folder: str,
    shape: tuple[int, ...],
    steps: range = range(STEPS),
    flips: bool = False,
    **given: Any,
) -> None:
    """A run with a recorder; one bit of one gradient on the last rank may flip."""
    run = Run(shape, **({"slots": 2} | given))
    turns = []

    def flip(step: int) -> None:
        turns.append(step)
        if (step, turns.count(step), rank) == (FLIPPED_AT, 2 // size, size - 1):
            gradient = run.model.get_parameter(FLIPPED).grad
            assert isinstance(gradient, DTensor)
            gradient.to_local().view(torch.int32)[3, 5] ^= 1

    run.after_backward = flip if flips else run.after_backward
    with Recorder(folder, run.plugin, run.model, run.optimizer):
        run.train(steps)


def command(*arguments: object) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(bisect)
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_a_flipped_bit_is_found(world1: World, world2: World, tmp_path: Path) -> None:
    one, two, flipped = (str(tmp_path / name) for name in ("one", "two", "flipped"))
    world1.run(recorded, one, (1,))
    world2.run(recorded, two, (2,), range(3))
    world2.run(recorded, flipped, (2,), range(STEPS), True)
    code, text = command(one, two)
    assert code == 0, text
    assert "of steps 0 to 3\n" in text  # the last weights are recorded too
    first = compare(one, flipped).first
    assert first is not None
    assert (first.step, *first.key) == (FLIPPED_AT, "gradients", "blocks.1", FLIPPED, None)
    code, text = command(one, flipped)
    assert code == 1
    assert f"step 17, gradients, group 'blocks.1': {FLIPPED} differs" in text
    assert "first of 1" in text
    found = json.loads(command(flipped, one, "--json")[1])
    assert not found["equal"]
    assert (found["first"]["step"], found["first"]["group"]) == (17, "blocks.1")


def recorded_once(rank: int, size: int, folder: str, shape: tuple[int, ...]) -> None:
    """Both dtypes of compute, and another optimizer."""
    recorded(rank, size, f"{folder}/fp32", shape, range(2), slots=SLOTS)
    other: dict[str, Any] = {
        "slots": SLOTS,
        "dtype": torch.bfloat16,
        "optimizer": lambda p, **k: polyshard_optimizers.flat(torch.optim.AdamW(p, **k)),
    }
    recorded(rank, size, f"{folder}/bf16", shape, range(2), **other)


def test_records_of_every_mesh_are_equal(world1: World, world4: World, tmp_path: Path) -> None:
    one, four = tmp_path / "1", tmp_path / "4"
    world1.run(recorded_once, str(one), (1,))
    world4.run(recorded_once, str(four), (2, 2))
    for dtype in ("fp32", "bf16"):
        found = compare(one / dtype, four / dtype)
        assert found.first is None
        # of 16 parameters: themselves, gradients twice and 3 states; 4 activations a slot
        assert found.compared == 2 * (16 * 6 + 4 * SLOTS) + 16


def header(**given: Any) -> str:
    told: dict[str, Any] = {
        "slots": 4, "seed": 0, "parameters": [["(root)", "weight", [2, 3], "torch.float32"]],
        "first": 0, "started": 1.0, "rank": 0, "world_size": 1, "replica": 0, "torch": "2.13.0",
        "threads": 1, "format": 1,
    }  # fmt: skip
    return json.dumps({"polyshard_records": told | given}) + "\n"


def step(number: int, *digests: tuple[Any, ...]) -> str:
    return json.dumps({"step": number, "digests": digests}) + "\n"


def weight(digest: int, phase: str = "parameters", name: str = "weight") -> tuple[Any, ...]:
    return (phase, "(root)", name, None, 1, f"{digest:016x}")


def put(folder: Path, *lines: str, rank: int = 0, size: int = 1, first: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    given = {"rank": rank, "world_size": size, "first": first, "started": float(first + 1)}
    head = lines[0] if lines and "polyshard_records" in lines[0] else header(**given)
    steps = lines[1:] if head is lines[0] else lines
    path = folder / f"from-{first:06}-rank-{rank}-of-{size}.jsonl"
    path.write_text(head + "".join(steps))
    return folder


def test_parts_add_up_modulo_2_to_64(tmp_path: Path) -> None:
    one = put(tmp_path / "one", step(0, weight(1)))
    put(two := tmp_path / "two", step(0, weight((1 << 64) - 4)), rank=0, size=2)
    put(two, step(0, weight(5)), rank=1, size=2)
    assert command(one, two)[0] == 0
    put(two, step(0, weight(6)), rank=1, size=2)
    assert command(one, two)[0] == 1


def test_replicas_that_differ_are_a_difference(tmp_path: Path) -> None:
    one = put(tmp_path / "one", step(0, weight(1)))
    two = tmp_path / "two"
    for rank, digest in enumerate((1, 2)):
        given = header(rank=rank, world_size=2, replica=rank)
        put(two, given, step(0, weight(digest)), rank=rank, size=2)
    code, text = command(one, two)
    assert code == 1
    assert "weight is not the same on all ranks of the second run that have it" in text


def test_a_step_is_compared_in_the_order_of_computation(tmp_path: Path) -> None:
    def folder(name: str, *digests: int) -> Path:
        phases = ("stepped gradients", "gradients", "parameters")
        found = [weight(d, p) for d, p in zip(digests, phases, strict=True)]
        late = ("activations", "(root)", "output 0", 3, 0, "05")
        early = ("activations", "(root)", "output 0", 1, 0, f"{digests[0]:x}")
        return put(tmp_path / name, step(0, *found, late, early), step(1, weight(digests[1])))

    one = folder("one", 1, 1, 1)
    first = [compare(one, folder(str(i), *d)).first for i, d in enumerate([(2, 2, 1), (1, 2, 1)])]
    assert [(f.step, f.key.phase, f.key.slot) for f in first if f] == [
        (0, "activations", 1),
        (0, "gradients", None),
    ]


def test_what_one_run_alone_has_is_a_difference(tmp_path: Path) -> None:
    one = put(tmp_path / "one", step(0, weight(1), weight(2, name="bias")))
    two = put(tmp_path / "two", step(0, weight(1)))
    assert "bias is only in the first run" in command(one, two)[1]
    assert "bias is only in the second run" in command(two, one)[1]
    # A phase that only one of them has reached in its last step is none.
    three = put(tmp_path / "three", step(0, weight(1), weight(3, "gradients")))
    assert command(two, three)[0] == 0


def test_a_run_that_was_started_again_goes_on_there(tmp_path: Path) -> None:
    one = put(tmp_path / "one", *[step(s, weight(s)) for s in range(5)])
    two = put(tmp_path / "two", *[step(s, weight(s if s < 2 else 9)) for s in range(4)])
    for rank in (0, 1):  # on two ranks, from step 2
        put(two, *[step(s, weight(s * rank)) for s in (2, 3, 4)], rank=rank, size=2, first=2)
    found = compare(one, two)
    assert found.first is None
    assert found.steps == (0, 1, 2, 3, 4)


def died(folder: Path, first: int, *steps: int, size: int = 2) -> Path:
    """Started at ``first``; the last rank died before its first line."""
    for rank in range(size - 1):
        put(folder, *[step(s, weight(9)) for s in steps], rank=rank, size=size, first=first)
    return folder


def test_a_start_that_was_made_again_may_lack_ranks(tmp_path: Path) -> None:
    one = put(tmp_path / "one", *[step(s, weight(s)) for s in range(5)])
    two = put(tmp_path / "two", *[step(s, weight(s)) for s in range(4)])
    died(two, 3, 3)
    (two / "from-000003-rank-1-of-2.jsonl").write_text("")  # killed between open and write
    put(two, header(first=2, started=9.0), *[step(s, weight(s)) for s in (2, 3, 4)], first=2)
    found = compare(one, two)
    assert (found.first, found.steps, found.notes) == (None, (0, 1, 2, 3, 4), ())


@pytest.mark.parametrize("torn", ["", header(rank=1, world_size=2)[:40]])
def test_a_last_start_without_whole_steps_is_left_out(tmp_path: Path, torn: str) -> None:
    one = put(tmp_path / "one", *[step(s, weight(s)) for s in range(5)])
    two = died(put(tmp_path / "two", *[step(s, weight(s)) for s in range(3)]), 3, 3)
    (two / "from-000003-rank-1-of-2.jsonl").write_text(torn)
    code, text = command(one, two)
    assert code == 0, text
    assert "of steps 0 to 2" in text
    missing = "of the 2 ranks that ran from step 3 on, records of [1] are missing"
    assert f"note: {two}: {missing}; that start is left out" in text.replace("\n", "")


def test_missing_steps_are_an_error(tmp_path: Path) -> None:
    one = put(tmp_path / "one", *[step(s, weight(s)) for s in range(9)])
    between = died(put(tmp_path / "between", *[step(s, weight(s)) for s in range(3)]), 3, 3)
    put(between, *[step(s, weight(s)) for s in (4, 5)], first=4)
    far = died(put(tmp_path / "far", *[step(s, weight(s)) for s in range(3)]), 3, 3, 4, 5)
    for other in (between, far, died(tmp_path / "alone", 3, 3)):
        code, text = command(one, other)
        assert code == 2, text
        assert "that ran from step 3 on, records of [1] are missing" in text


def test_rolled_back_and_torn_lines_do_not_count(tmp_path: Path) -> None:
    one = put(tmp_path / "one", *[step(s, weight(s)) for s in range(5)])
    lines = [step(s, weight(d)) for s, d in ((0, 0), (1, 9), (2, 9), (3, 9), (1, 1), (2, 2))]
    two = put(tmp_path / "two", *lines, step(3, weight(9))[:-9])
    found = compare(one, two)
    assert found.first is None
    assert found.steps == (0, 1, 2)


def test_other_versions_and_threads_are_noted(tmp_path: Path) -> None:
    one = put(tmp_path / "one", step(0, weight(1)))
    two = put(tmp_path / "two", header(torch="2.15.0", threads=4), step(0, weight(1)))
    code, text = command(one, two)
    assert code == 0
    assert "note: torch: 2.13.0 in the first run, 2.15.0 in the second" in text
    assert "note: threads: 1 in the first run, 4 in the second" in text


BAD: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "slots": ({"slots": 8}, [step(0, weight(1))], "have slots=4 and slots=8"),
    "seed": ({"seed": 1}, [step(0, weight(1))], "have seed=0 and seed=1"),
    "model": ({"parameters": [["(root)", "weight", [2, 4], "torch.float32"]]}, [],
              "different models: 'weight' [2, 3] torch.float32 of group '(root)' in one"),
    "smaller": ({"parameters": []}, [], "in one, nothing more in the other"),
    "ranks": ({"world_size": 3}, [], "of the 3 ranks that ran from step 0 on, records of [1, 2]"),
    "format": ({"format": 2}, [], "has format 2; this version reads 1"),
    "broken": ({}, ["{not json}\n"], "is no record of a run (JSONDecodeError"),
    "fields": ({"new": 1}, [], "is no record of a run (TypeError"),
    "number": ({"world_size": "1"}, [], "is no record of a run (TypeError: world_size is '1'"),
    "phase": ({}, [step(0, weight(1)).replace("parameters", "parameterz")],
              "is no record of a run (ValueError: ['parameterz'"),
    "slot": ({}, [step(0, weight(1)).replace("null", '"1"')],
             "is no record of a run (ValueError: ['parameters'"),
    "steps": ({}, [step(7, weight(1))], "have no step in common: steps 0 to 0, and steps 7 to 7"),
    "empty": ({}, [], "have no step in common: steps 0 to 0, and no whole step"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compared_is_said(name: str, tmp_path: Path) -> None:
    given, lines, says = BAD[name]
    one = put(tmp_path / "one", step(0, weight(1)))
    code, text = command(one, put(tmp_path / "two", header(**given), *lines))
    assert code == 2, text
    assert text.startswith("error: ")
    assert says in text


def test_folders_without_records_are_said(tmp_path: Path) -> None:
    one = put(tmp_path / "one", step(0, weight(1)))
    for other in (tmp_path / "nowhere", tmp_path):
        code, text = command(one, other)
        assert (code, text.startswith(f"error: {other} holds no records of a run")) == (2, True)
    (tmp_path / "from-000000-rank-0-of-1.jsonl").write_bytes(b"")
    assert "holds no records of a run" in command(one, tmp_path)[1]


def test_the_picture_marks_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = put(tmp_path / "one", *[step(s, weight(s)) for s in range(3)])
    two = put(tmp_path / "two", *[step(s, weight(s + (s > 0))) for s in range(3)])
    assert cells(compare(one, two)) == [[0, 1, 1]]
    late = put(tmp_path / "late", step(0, weight(0), weight(1, "gradients")))
    later = put(tmp_path / "later", step(0, weight(0), weight(2, "gradients")))
    assert cells(compare(late, later)) == [[1 + PHASES.index("gradients")]]
    picture = tmp_path / "new" / "grid.png"
    for other, code in ((one, 0), (two, 1)):
        assert command(one, other, "--picture", picture)[0] == code
        assert picture.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("polyshard_reproducible.picture.find_spec", lambda name: None)
    code, text = command(one, two, "--picture", picture)
    assert code == 2
    assert "matplotlib is missing; pip install 'polyshard-reproducible[picture]'" in text


def test_it_is_a_verb_of_the_command() -> None:
    declared = Path(__file__).parents[1] / "pyproject.toml"
    points = tomllib.loads(declared.read_text())["project"]["entry-points"]
    value = points["polyshard.commands"]["bisect"]
    assert EntryPoint("bisect", value, "polyshard.commands").load() is bisect
