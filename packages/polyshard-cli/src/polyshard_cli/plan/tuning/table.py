"""The search as tables for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from polyshard.planning import readable
from polyshard_cli.plan.tuning.choice import reshard_text
from polyshard_cli.plan.tuning.document import Point, Tuning

__all__ = ["show_tuning"]

MOST_ROWS = 12
MOST_REFUSALS = 5
MOST_DIFFERENCES = 4
LONGEST = 240


def show_tuning(tuning: Tuning, console: Console) -> None:
    """Print ``tuning``."""
    console.print(Group(*_parts(tuning)))
    console.print(Text("The best, as Python:", style="bold"))
    console.print(Text(tuning.python), soft_wrap=True)  # whole lines, to be pasted


def _parts(tuning: Tuning) -> Iterator[RenderableType]:
    yield _head(tuning)
    yield _front(tuning)
    yield from _words(tuning)
    if tuning.runner_up is not None:
        yield _runner_up(tuning)
    for refusal in tuning.refused[:MOST_REFUSALS]:
        reason = refusal.reason
        shown = reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}... (all with --json)"
        yield Text(f"refused ({refusal.count}): {shown}", style="yellow")
    for words in tuning.skipped:
        yield Text(f"not searched: {words}", style="dim")


def _head(tuning: Tuning) -> Text:
    refused = sum(refusal.count for refusal in tuning.refused)
    limit = readable(tuning.budget_bytes) if tuning.budget_bytes else "any memory"
    how = "" if tuning.is_exhaustive else ", the best meshes first, not every combination"
    return Text(
        f"{tuning.model} on {tuning.ranks:,} ranks of {tuning.machine}, {tuning.batch:,} x "
        f"{tuning.sequence:,} tokens a step: {tuning.tried:,} settings planned{how}, "
        f"{tuning.fitting:,} fit {limit}, {refused:,} refused."
    )


def _front(tuning: Tuning) -> Table:
    table = Table(
        title="Memory against time",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 1),
    )
    for column in ("", "step, ms", "memory"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for column in ("mesh", "units", "reshard", "codec", "offload"):
        table.add_column(column, overflow="fold")
    words = _word_of(tuning)
    for point in _shown(tuning):
        mark = "best" if point.chosen else "" if point.fits else "large"
        style = "bold" if point.chosen else None if point.fits else "dim"
        table.add_row(*_row(mark, point, words), style=style)
    return table


def _words(tuning: Tuning) -> Iterator[Text]:
    """What words for units stand for."""
    for word in dict.fromkeys(_word_of(tuning)[point.units] for point in _shown(tuning)):
        patterns = " ".join(f"--units '{pattern}'" for pattern in tuning.units[word])
        if patterns:
            yield Text(f"{word}: {patterns}", style="dim")


def _word_of(tuning: Tuning) -> dict[tuple[str, ...], str]:
    return {patterns: word for word, patterns in tuning.units.items()}


def _shown(tuning: Tuning) -> list[Point]:
    """Evenly chosen where there are many, the ends and the best among them."""
    front = tuning.front
    if len(front) <= MOST_ROWS:
        return list(front)
    last = len(front) - 1
    indices = {round(i * last / (MOST_ROWS - 2)) for i in range(MOST_ROWS - 1)}
    indices |= {i for i, point in enumerate(front) if point.chosen}
    return [front[i] for i in sorted(indices)]


def _row(mark: str, point: Point, words: Mapping[tuple[str, ...], str]) -> tuple[str, ...]:
    return (
        mark,
        f"{point.seconds * 1e3:,.3f}",
        readable(point.memory_bytes),
        point.mesh.replace(",", " "),
        words[point.units],
        reshard_text(point.reshard),
        point.quantize or "-",
        point.offload.replace(",", " ").replace("fraction=", "") or "-",
    )


def _runner_up(tuning: Tuning) -> Group:
    other = tuning.runner_up
    assert other is not None
    lines: list[RenderableType] = [
        Text(f"Runner-up: {other.point.name}", style="bold"),
        Text(f"{other.reason}."),
    ]
    for found in other.differences[:MOST_DIFFERENCES]:
        lines.append(
            Text(
                f"  {found.part}: {found.best_seconds * 1e3:,.3f} ms, "
                f"there {found.other_seconds * 1e3:,.3f} ms"
            )
        )
    return Group(*lines)
