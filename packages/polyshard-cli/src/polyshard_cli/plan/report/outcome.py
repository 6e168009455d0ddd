"""What happened in a run, beside what was predicted of it, as one page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from polyshard.planning import readable
from polyshard_cli.plan.page.blocks import Bar, Bars, Block, Plot, Section, Series, Table, Text
from polyshard_cli.plan.page.html import render
from polyshard_cli.plan.report.document import Document
from polyshard_cli.plan.report.sections import milliseconds, plan_sections, unit_of

ON_MACHINE = ("time", "notices")
"""Sections that say nothing without a machine."""
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


def predicted_facts(document: Document, *, host_counts: bool) -> RankFacts:
    """What ``document`` says of its rank, in the terms of a run.

    Args:
        document: the plan of one rank.
        host_counts: whether what rests on the host is in the memory that is compared, as on a CPU.
    """
    host = sum(document.memory.tiers.get("host", {}).values()) if host_counts else 0
    return RankFacts(document.memory.peak.total + host, document.counted_bytes)


def run_page(
    title: str,
    lead: str,
    outcome: Outcome,
    plans: Mapping[int, tuple[Document, RankFacts]],
    *,
    is_timed: bool = False,
) -> str:
    """One page of HTML.

    Args:
        title: of the run.
        lead: the sentences below it.
        outcome: what happened.
        plans: of ranks, with what is compared of them; none where nothing was predicted.
        is_timed: whether the plan is for the machine of the run, so that its time says something.
    """
    document = plans[min(plans)][0] if plans else None
    timing = document.timing if document is not None and is_timed else None
    seconds = None if timing is None else timing.step_seconds
    facts = {rank: found for rank, (_, found) in plans.items()}
    compared = tuple(_compared(outcome, facts, seconds))
    sections = [
        Section("outcome", "Measured and predicted", compared),
        Section("steps", "Step by step", tuple(_steps(outcome, seconds))),
    ]
    if document is not None and is_timed:
        sections += plan_sections(document)
    elif document is not None:
        machine = replace(document.machine, name="not named", sources=(), memory_bytes=0)
        known = plan_sections(replace(document, machine=machine, timing=None))
        sections += [section for section in known if section.name not in ON_MACHINE]
    return render(title, lead, sections)


def _compared(
    outcome: Outcome, predicted: Mapping[int, RankFacts], step_seconds: float | None
) -> Iterator[Block]:
    """Both side by side; ranks may be missing in what was predicted."""
    yield from map(Text, outcome.notes)
    happened = median(outcome.step_seconds) if outcome.step_seconds else None
    shown = [UNKNOWN if s is None else milliseconds(s) for s in (step_seconds, happened)]
    rows = [("time of a step (median)", *shown, _ratio(step_seconds, happened))]
    for what, field in (("memory", "memory_bytes"), ("sent in a step", "sent_bytes")):
        ranks = range(len(outcome.ranks))
        found = [getattr(facts, field) for facts in outcome.ranks]
        said = [getattr(predicted.get(rank), field, None) for rank in ranks]
        if any(found):
            yield _bars(what, said[:MOST_DRAWN], found[:MOST_DRAWN])
        for rank, pair in enumerate(zip(said, found, strict=True)):
            rows.append((f"rank {rank}: {what}", *map(_size, pair), _ratio(*pair)))
    columns = ("what", "predicted", "happened", "happened / predicted")
    yield Table("Predicted and measured", columns, tuple(rows))


def _size(nbytes: int | None) -> str:
    return UNKNOWN if nbytes is None else f"{readable(nbytes)} ({nbytes:,})"


def _ratio(predicted: float | None, happened: float | None) -> str:
    if happened is None or not predicted:
        return UNKNOWN
    return "exact" if happened == predicted else f"{happened / predicted:.3f}"


def _bars(what: str, predicted: Sequence[int | None], happened: Sequence[int | None]) -> Bars:
    both = (("predicted", predicted), ("happened", happened))
    drawn = [(label, sizes) for label, sizes in both if any(sizes)]
    unit, unit_name = unit_of(max(size or 0 for size in (*predicted, *happened)))
    labels = tuple(label for label, _ in drawn)
    count = len(drawn)
    rows = tuple(f"rank {r}" if not n else "" for r in range(len(happened)) for n in range(count))
    bars = tuple(
        Bar(rank * count + number, 0.0, (size or 0) / unit, number)
        for number, (_, sizes) in enumerate(drawn)
        for rank, size in enumerate(sizes)
    )
    name, title = f"{what.partition(' ')[0]}-outcome", f"{what} of ranks, {' and '.join(labels)}"
    return Bars(name, title.capitalize(), rows, labels, bars, f"{what}, {unit_name}")


def _steps(outcome: Outcome, step_seconds: float | None) -> Iterator[Block]:
    """Loss and time over the steps of the run."""
    curves = (("training", outcome.losses), ("held out", outcome.held_out))
    if outcome.losses:
        first, last = outcome.losses[0][1], outcome.losses[-1][1]
        title = f"Loss over the steps: {first:.3f} at first, {last:.3f} in the end"
        series = tuple(Series(label, some, not n) for n, (label, some) in enumerate(curves) if some)
        yield Plot("loss-picture", title, series, "step", "loss")
    if times := tuple((n, s * 1e3) for n, s in enumerate(outcome.step_seconds, 1)):
        title = f"Time of every step; the median is {milliseconds(median(outcome.step_seconds))}"
        shown = [Series("happened", times)]
        if step_seconds is not None:
            ends = ((1, step_seconds * 1e3), (len(times), step_seconds * 1e3))
            shown.append(Series("predicted", ends, is_line=True))
        yield Plot("steps-picture", title, tuple(shown), "step, in the order they ran", "ms")
    rows = tuple(
        (name, f"{some[0][1]:.4f}", f"{some[-1][1]:.4f}", f"{min(v for _, v in some):.4f}")
        for name, some in (("training loss", curves[0][1]), ("held-out loss", curves[1][1]))
        if some
    )
    if rows:
        yield Table("Losses", ("what", "first", "last", "least"), rows)
    elif not times:
        yield Text("No step was made.")
