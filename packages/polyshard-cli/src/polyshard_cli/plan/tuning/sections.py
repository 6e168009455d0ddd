"""A search as sections, for a terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from polyshard.planning import readable
from polyshard_cli.plan.drafting import draft
from polyshard_cli.plan.page.blocks import Block, Items, Plot, Section, Series, Table, Text
from polyshard_cli.plan.report.sections import milliseconds, plan_page
from polyshard_cli.plan.request.mesh import parse_mesh
from polyshard_cli.plan.request.settings import Settings
from polyshard_cli.plan.tuning.search import Choice, reshard_text, with_batch
from polyshard_cli.plan.tuning.tune import Point, Tuning

MOST_ROWS = 12
MOST_REFUSALS = 5
MOST_DIFFERENCES = 4
GIB = 1 << 30


def tuning_page(tuning: Tuning, settings: Settings) -> str:
    """What a search that began with ``settings`` found, and the plan of the best."""
    best = tuning.best
    mesh = parse_mesh(best.mesh)
    choice = Choice(mesh, best.units, best.reshard, best.quantize, best.offload)
    document = draft(choice.applied(with_batch(settings)))
    return plan_page(document, (tuning_section(tuning, len(tuning.front)),))


def lead_of(tuning: Tuning) -> str:
    """What was searched, in a sentence."""
    refused = sum(refusal.count for refusal in tuning.refused)
    limit = readable(tuning.budget_bytes) if tuning.budget_bytes else "any memory"
    how = "" if tuning.is_exhaustive else ", the best meshes first, not every combination"
    return (
        f"{tuning.model} on {tuning.ranks:,} ranks of {tuning.machine}, {tuning.batch:,} x "
        f"{tuning.sequence:,} tokens a step: {tuning.tried:,} settings planned{how}, "
        f"{tuning.fitting:,} fit {limit}, {refused:,} refused."
    )


def tuning_section(tuning: Tuning, most: int = MOST_ROWS) -> Section:
    """Settings that no other beats in memory and time, at most so many, and the runner-up."""
    return Section("tuning", "Memory against time", tuple(_blocks(tuning, most)))


def _blocks(tuning: Tuning, most: int) -> Iterator[Block]:
    front, best = list(tuning.front), tuning.best
    if not any(point.chosen for point in front):  # another fits as well, and takes as much
        front.append(best)
    yield _plot(front, tuning)
    words = {patterns: word for word, patterns in tuning.units.items()}
    yield _table(_some(front, most), words)
    used = dict.fromkeys(point.units for point in front if point.units)
    said = [(words[u], " ".join(f"--units '{pattern}'" for pattern in u)) for u in used]
    said += [("best", best.name)]
    other = tuning.runner_up
    if other is not None:
        said += [("Runner-up", other.point.name), ("", f"{other.reason}.")]
        for d in other.differences[:MOST_DIFFERENCES]:
            here, there = milliseconds(d.best_seconds), milliseconds(d.other_seconds)
            said.append(("", f"{d.part}: {here}, there {there}"))
    said += [(f"refused ({one.count})", one.reason) for one in tuning.refused[:MOST_REFUSALS]]
    yield Items((*said, *(("not searched", words) for words in tuning.skipped)))
    yield Text("The best, as Python:")


def _some(front: list[Point], most: int) -> list[Point]:
    """Evenly chosen where there are many, the ends and the best among them."""
    if len(front) <= most:
        return front
    last = len(front) - 1
    indices = {round(i * last / (most - 2)) for i in range(most - 1)}
    indices |= {i for i, point in enumerate(front) if point.chosen}
    return [front[i] for i in sorted(indices)]


def _table(points: list[Point], words: Mapping[tuple[str, ...], str]) -> Table:
    rows = tuple(
        (
            "best" if point.chosen else "" if point.fits else "large",
            f"{point.seconds * 1e3:,.3f}",
            readable(point.memory_bytes),
            point.mesh.replace(",", " "),
            words[point.units],
            reshard_text(point.reshard),
            point.quantize or "-",
            point.offload.replace(",", " ").replace("fraction=", "") or "-",
        )
        for point in points
    )
    kinds = ("mesh", "units", "reshard", "codec", "offload")
    marked = tuple(place for place, point in enumerate(points) if point.chosen)
    caption = "The fastest first; no other takes less memory in less time"
    return Table(caption, ("", "step, ms", "memory", *kinds), rows, kinds, marked=marked)


def _plot(front: list[Point], tuning: Tuning) -> Plot:
    series = [
        Series(label, tuple((p.memory_bytes / GIB, p.seconds * 1e3) for p in some))
        for label, some in (
            ("looked at", [p for p in front if not p.chosen]),
            ("chosen", [p for p in front if p.chosen]),
        )
        if some
    ]
    largest = max(point.memory_bytes for point in front)
    budget = tuning.budget_bytes
    limit = (budget / GIB, "the limit") if budget and budget < 3 * largest else None
    title = (
        f"Memory against time of {len(front)} settings; {milliseconds(tuning.best.seconds)} a step "
        f"in {readable(tuning.best.memory_bytes)} was chosen"
    )
    axes = ("GiB of a device at its peak", "milliseconds of a step")
    return Plot("tuning-picture", title, tuple(series), *axes, limit)
