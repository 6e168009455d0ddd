"""One cell: run it, and compare what its ranks saw with the table and with an undisturbed run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from composition_table import Cell
from fault_table import BAR_SECONDS, TIMEOUT_SECONDS, FaultCell, Way
from faults.processes import Ranks
from faults.training import Seen, disturbed, planned, resumed, undisturbed

CODECS = ("encode", "decode", "bind")
"""Faults whose stacks hold a codec more: another oracle, where none of the stack's has one."""


@dataclass(frozen=True)
class Shown:
    """What was measured: seconds to the error, by rank; ``None`` for one whose process ended."""

    seconds: list[float | None]

    @property
    def slowest(self) -> float:
        """Of all ranks that saw an error."""
        return max(each for each in self.seconds if each is not None)


@cache
def oracle(cell: Cell, fault: str, device: str) -> list[Seen]:
    """What undisturbed ranks see."""
    ranks = Ranks(cell.layout.ranks, TIMEOUT_SECONDS, device=device)
    with TemporaryDirectory(prefix="polyshard-faults-") as folder:
        found = ranks.run(undisturbed, cell, fault, folder)
    seen: list[Seen] = found
    return seen


def run_cell(at: FaultCell, folder: str) -> Shown:
    """Run and check a cell.

    Raises:
        AssertionError: where ranks saw something else than the table says, or lost more.
    """
    cell, fault = at.cell, at.fault
    expected = oracle(cell, fault.id if fault.id in CODECS else "", at.device)
    ended = () if at.struck_kind else at.struck
    ranks = Ranks(cell.layout.ranks, TIMEOUT_SECONDS, keeper=fault.keeper, device=at.device)
    work = planned if at.way is Way.NEW_PLAN else disturbed
    told = (cell, fault.id, at.struck, folder, *((True,) if at.in_attempt else ()))
    seen: list[Seen | None] = ranks.run(work, *told, ended=ended)
    seconds = _check_errors(at, seen, folder)
    if at.way is Way.RESTART:
        again = Ranks(cell.layout.ranks, TIMEOUT_SECONDS, device=at.device)
        found: list[Seen] = again.run(resumed, cell, fault.id, folder)
        for old, new, whole in zip(seen, found, expected, strict=True):
            new.before, new.losses = whole.before, whole.losses[:-2] + new.losses
            assert old is None or old.before == whole.before
        _check_nothing_else_lost(found, expected)
    else:
        _check_nothing_else_lost([each for each in seen if each is not None], expected)
    return Shown(seconds)


def _check_errors(at: FaultCell, seen: list[Seen | None], folder: str) -> list[float | None]:
    seconds: list[float | None] = []
    for rank, each in enumerate(seen):
        if each is None:
            assert rank in at.struck
            seconds.append(None)
            continue
        kinds = (at.struck_kind,) if rank in at.struck else at.peers
        assert each.kind in kinds, f"rank {rank} met {each.kind or 'nothing'}: {each.text}"
        late = each.seconds(Path(folder))
        assert late < BAR_SECONDS, f"rank {rank} after {late:.1f} s: {each.text}"
        seconds.append(late)
        if at.peers[0] in kinds:
            _check_words(at, each.text)
    return seconds


def _check_words(at: FaultCell, text: str) -> None:
    """In their order."""
    rest = text
    for words in at.words:
        assert words in rest, f"no {words!r} in {text!r}"
        rest = rest.partition(words)[2]


def _check_nothing_else_lost(seen: list[Seen], expected: list[Seen]) -> None:
    for each, whole in zip(seen, expected, strict=True):
        assert each.part == whole.part
        assert each.before == whole.before
        assert each.after == whole.before, "more was lost than the step"
        assert each.losses == whole.losses
        assert each.end == whole.end
