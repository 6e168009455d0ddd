"""What happened in a run, beside what was predicted of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from polyshard.planning import readable
from polyshard_cli.plan.page.blocks import Block, Drawing, Section, Table, Text
from polyshard_cli.plan.page.canvas import Canvas, unit_of
from polyshard_cli.plan.page.sections.timeline import milliseconds

__all__ = ["Outcome", "RankFacts", "outcome_section", "steps_section"]

MOST_DRAWN = 16
"""Ranks of which a drawing has bars; the table has all."""
UNKNOWN = "–"


@dataclass(frozen=True)
class RankFacts:
    """Of one rank, counted or predicted; ``None`` is not known."""

    memory_bytes: int | None = None
    """The model's part of its peak."""
    sent_bytes: int | None = None
    """In one step."""


@dataclass(frozen=True)
class Outcome:
    """A run that has ended."""

    ranks: tuple[RankFacts, ...]
    step_seconds: tuple[float, ...]
    """Of every step, in order."""
    losses: tuple[tuple[int, float], ...] = ()
    """Numbers of steps, and training losses."""
    held_out: tuple[tuple[int, float], ...] = ()
    notes: tuple[str, ...] = ()
    """How what was counted was counted, and why something is not predicted."""


def outcome_section(
    outcome: Outcome, predicted: Mapping[int, RankFacts], step_seconds: float | None
) -> Section:
    """Both side by side.

    Args:
        outcome: what happened.
        predicted: by rank; ranks may be missing.
        step_seconds: predicted time of a step, if there is a prediction.
    """
    rows = [_time(outcome, step_seconds)]
    for rank, happened in enumerate(outcome.ranks):
        said = predicted.get(rank, RankFacts())
        rows.append(_sizes(f"rank {rank}: sent in a step", said.sent_bytes, happened.sent_bytes))
        rows.append(_sizes(f"rank {rank}: memory", said.memory_bytes, happened.memory_bytes))
    columns = ("what", "predicted", "happened", "happened / predicted")
    blocks: list[Block] = [Text(note) for note in outcome.notes]
    for what, field in (("Memory", "memory_bytes"), ("Bytes sent in a step", "sent_bytes")):
        happened_sizes = [getattr(facts, field) for facts in outcome.ranks]
        said_sizes = [getattr(predicted.get(r), field, None) for r in range(len(outcome.ranks))]
        if any(happened_sizes):
            blocks.append(_drawing(what, said_sizes[:MOST_DRAWN], happened_sizes[:MOST_DRAWN]))
    blocks.append(Table("What was predicted, and what happened", columns, tuple(rows)))
    return Section("outcome", "What happened, and what was predicted", tuple(blocks))


def _time(outcome: Outcome, predicted: float | None) -> tuple[str, ...]:
    happened = median(outcome.step_seconds) if outcome.step_seconds else None
    return (
        "time of a step (median)",
        UNKNOWN if predicted is None else milliseconds(predicted),
        UNKNOWN if happened is None else milliseconds(happened),
        _ratio(predicted, happened),
    )


def _sizes(what: str, predicted: int | None, happened: int | None) -> tuple[str, ...]:
    return (what, _size(predicted), _size(happened), _ratio(predicted, happened))


def _size(nbytes: int | None) -> str:
    return UNKNOWN if nbytes is None else f"{readable(nbytes)} ({nbytes:,})"


def _ratio(predicted: float | None, happened: float | None) -> str:
    if happened is None or not predicted:
        return UNKNOWN
    return "exact" if happened == predicted else f"{happened / predicted:.3f}"


def _drawing(what: str, predicted: Sequence[int | None], happened: Sequence[int | None]) -> Drawing:
    both = (("predicted", predicted, -0.2), ("happened", happened, 0.2))
    drawn = [(number, *one) for number, one in enumerate(both) if any(one[1])]
    unit, unit_name = unit_of(max(size or 0 for size in (*predicted, *happened)))

    def draw(canvas: Canvas) -> None:
        for number, label, sizes, offset in drawn:
            places = [rank + offset for rank in range(len(sizes))]
            lengths = [(size or 0) / unit for size in sizes]
            canvas.axes.barh(places, lengths, height=0.38, color=canvas.colour(number), label=label)
        canvas.lanes([f"rank {rank}" for rank in range(len(happened))])
        canvas.axes.set_xlabel(f"{what.lower()}, {unit_name}")
        canvas.legend(2)

    title = f"{what} of ranks, {' and '.join(label for _, label, *_ in drawn)}"
    name = f"{what.split(maxsplit=1)[0].lower()}-outcome"
    return Drawing(name, title, draw, 1.5 * len(happened) + 1)


def steps_section(outcome: Outcome, step_seconds: float | None) -> Section:
    """Loss and time over the steps of the run."""
    blocks: list[Block] = []
    if outcome.losses:
        blocks.append(_curve(outcome))
    if outcome.step_seconds:
        blocks.append(_times(outcome.step_seconds, step_seconds))
    losses = [("training loss", outcome.losses), ("held-out loss", outcome.held_out)]
    rows = [
        (name, f"{some[0][1]:.4f}", f"{some[-1][1]:.4f}", f"{min(v for _, v in some):.4f}")
        for name, some in losses
        if some
    ]
    if rows:
        blocks.append(Table("Losses", ("what", "first", "last", "least"), tuple(rows)))
    if not blocks:
        blocks.append(Text("No step was made."))
    return Section("steps", "Step by step", tuple(blocks))


def _curve(outcome: Outcome) -> Drawing:
    def draw(canvas: Canvas) -> None:
        for number, (label, some) in enumerate(
            (("training", outcome.losses), ("held out", outcome.held_out))
        ):
            if some:
                style = "o-" if number else "-"
                canvas.axes.plot(*zip(*some, strict=True), style, color=canvas.colour(number),
                                 markersize=4, label=label)  # fmt: skip
        canvas.count("step")
        canvas.axes.set_ylabel("loss")
        canvas.legend(2)

    last = outcome.losses[-1]
    title = f"Loss over the steps: {outcome.losses[0][1]:.3f} at first, {last[1]:.3f} in the end"
    return Drawing("loss-picture", title, draw, 6)


def _times(seconds: Sequence[float], predicted: float | None) -> Drawing:
    def draw(canvas: Canvas) -> None:
        steps = range(1, len(seconds) + 1)
        canvas.axes.plot(
            steps, [s * 1e3 for s in seconds], ".", markersize=3, color=canvas.colour(0),
            label="happened",
        )  # fmt: skip
        if predicted is not None:
            canvas.axes.axhline(predicted * 1e3, color=canvas.colour(1), ls="--", label="predicted")
        canvas.axes.set_ylim(bottom=0)
        canvas.count("step, in the order they ran")
        canvas.axes.set_ylabel("milliseconds")
        canvas.legend(2)

    title = f"Time of every step; the median is {milliseconds(median(seconds))}"
    return Drawing("steps-picture", title, draw, 5)
