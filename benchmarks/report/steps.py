"""The tables of the page about what a step takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.harness import MIB, Found, columns
from benchmarks.result import Result
from benchmarks.step.engines import KEPT_BEST, OTHERS
from benchmarks.step.rows import CLOSE, LOSSY, ROUNDED, ROWS, Row
from benchmarks.step.time import BEST_STEP, FLAT_MEMORY, FLOOR, MEMORY, OUR_BEST, STEP, THEIR_BEST

OLDER = (KEPT_BEST, *OTHERS)


@dataclass(frozen=True)
class Shown:
    """A row, and what was found for it."""

    row: Row
    found: Found

    def name(self) -> str:
        return f"`{self.row.name}`"

    def case(self) -> str:
        return ", ".join(str(self.found["case"][k]) for k in ("width", "tokens", "ranks"))

    def ms(self, engine: str) -> str:
        times = self.found["median_seconds"]
        return f"{1e3 * times[engine]['step']:.1f}" if engine in times else ""

    def mib(self, engine: str) -> str:
        peaks = self.found["resident_bytes"]
        return f"{peaks[engine]['peak'] / MIB:.0f}" if engine in peaks else ""

    def limit(self, quantity: str) -> float | None:
        return next((bar.at_most for bar in self.row.bars if bar.quantity == quantity), None)

    def bar(self, quantity: str) -> str:
        limit = self.limit(quantity)
        return "" if limit is None else f"{limit:.2f}"

    def ratio(self, quantity: str) -> str:
        ratio = self.found["ratios"].get(quantity)
        return "" if ratio is None else held(ratio, self.limit(quantity))

    def losses(self) -> str:
        difference = self.found["losses_largest_relative_difference"]
        if self.found["losses_equal"]:
            return "bitwise"
        text = f"within {difference:.0e}"
        if self.row.losses == LOSSY:
            return f"{text} (lossy)"
        ok = self.row.losses == ROUNDED and difference <= CLOSE[self.row.case.dtype]
        return text if ok else f"**{text}**"

    def missed(self) -> Iterator[str]:
        for bar in self.row.bars:
            ratio = self.found["ratios"].get(bar.quantity)
            if ratio is not None and ratio > bar.at_most:
                reason = bar.reason or "No reason is recorded yet."
                where = f"{bar.quantity} {ratio:.2f}, bar {bar.at_most:.2f}"
                yield f"- {self.name()}, {where}: {reason}"
        losses = self.losses().strip("*")
        if losses != self.losses():
            yield f"- {self.name()}, losses: {losses}, meant to be {self.row.losses}."


Columns = dict[str, Callable[[Shown], str]]
STEPS: Columns = {
    "row": Shown.name,
    "width, tokens, ranks": Shown.case,
    "polyshard ms": lambda one: one.ms("polyshard"),
    "FSDP2 ms": lambda one: one.ms("torch"),
    "step / FSDP2": lambda one: one.ratio(STEP),
    "paired": lambda one: one.ratio(f"{STEP}, paired"),
    "bar": lambda one: one.bar(STEP),
    "step / floor": lambda one: one.ratio(FLOOR),
    "peak RSS / FSDP2": lambda one: one.ratio(MEMORY),
    "losses": Shown.losses,
}
BEST_STEPS: Columns = {
    "row": Shown.name,
    "polyshard ms": lambda one: one.ms(OUR_BEST),
    "step / FSDP2": lambda one: one.ratio(BEST_STEP),
    "bar": lambda one: one.bar(BEST_STEP),
}
OTHER_STEPS: Columns = {
    "row": Shown.name,
    "kept ms": lambda one: one.ms(KEPT_BEST),
    "DDP ms": lambda one: one.ms("ddp"),
    "FSDP1 ms": lambda one: one.ms("fsdp1"),
}
PEAKS: Columns = {
    "row": Shown.name,
    "peak MiB": lambda one: one.mib(OUR_BEST),
    "FSDP2 MiB": lambda one: one.mib(THEIR_BEST),
    "kept MiB": lambda one: one.mib(KEPT_BEST),
    "DDP MiB": lambda one: one.mib("ddp"),
    "FSDP1 MiB": lambda one: one.mib("fsdp1"),
    "peak / FSDP2 of the table above": lambda one: one.ratio(FLAT_MEMORY),
}


def step_tables(results: dict[str, Result]) -> dict[str, Iterable[str]]:
    """Lines by name of the part."""
    shown = [
        Shown(row.quick() if results[row.name].about.quick else row, results[row.name].found)
        for row in ROWS
        if row.name in results
    ]
    others = [one for one in shown if any(map(one.ms, OLDER))]
    return {
        "step-time": columns(shown, STEPS),
        "best-steps": columns([one for one in shown if one.ms(OUR_BEST)], BEST_STEPS),
        "other-steps": columns(others, OTHER_STEPS),
        "peaks": columns([one for one in shown if one.mib(OUR_BEST)], PEAKS),
        "notes": [f"- {one.name()}: {one.row.note}" for one in shown if one.row.note],
        "missed": [line for one in shown for line in one.missed()] or ["None."],
    }


def held(value: float, bar: float | None, form: str = ".2f") -> str:
    """A figure, in bold where it is above its bar."""
    return f"**{value:{form}}**" if bar is not None and value > bar else f"{value:{form}}"
