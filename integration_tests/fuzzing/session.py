"""Many cases on one set of ranks, which is replaced only after a failure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fuzzing import run
from fuzzing.case import Case
from fuzzing.known import known
from fuzzing.refusals import is_expected
from fuzzing.run import Outcome
from polyshard_testing import World
from polyshard_testing.world import RankError

RANKS = 4
SECONDS = 60.0
"""After which a case counts as hung."""


@dataclass(frozen=True)
class Verdict:
    """What came of a case.

    ``kind``: that of an :class:`Outcome`, or ``"hung"``, ``"died"``, ``"known"``.
    """

    kind: str
    text: str = ""

    @property
    def failed(self) -> bool:
        """Whether it is a finding."""
        return self.kind not in ("passed", "refused", "known")

    @property
    def signature(self) -> str:
        """Equal for cases that fail in the same way, more or less."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        places = re.findall(r'File "[^"]*/(polyshard[^"]*)", line (\d+)', self.text)
        if self.kind in ("raised", "died", "hung") and places:
            return f"{self.kind} {places[-1]} {re.sub(r'[0-9.e+-]+', '#', lines[-1])[:60]}"
        text = re.sub(r"\b[\w.]*\d[\w.]*\b|\([^)]*\)", "#", lines[0] if lines else "")
        return f"{self.kind} {text[:60]}"


class Session:
    """A world, and what is thrown at it."""

    def __init__(self, seconds: float = SECONDS) -> None:
        """``seconds``: after which a case counts as hung."""
        self.seconds = seconds
        self.world = World(RANKS, collective_seconds=seconds)

    def close(self) -> None:
        """End the ranks."""
        self.world.close()

    def check(self, case: Case, *, skip_known: bool = True) -> Verdict:
        """Run one case."""
        reason = known(case) if skip_known else None
        if reason is not None:
            return Verdict("known", reason)
        with run.scratch() as folder:
            try:
                self.world.run(run.is_ready, timeout=120.0)  # starts ranks where there are none
                answers = self.world.run(run.on_ranks, repr(case), folder, timeout=self.seconds)
                outcomes = [Outcome(*answer) for answer in answers]
            except RankError as error:
                hung = "did not answer" in str(error)
                told = "\n".join(_told(Path(folder)))
                return Verdict("hung" if hung else "died", f"{error}\n{told}")
        verdict = _agreed(outcomes[: case.mesh.ranks])
        if verdict.kind not in ("passed", "refused", "different"):
            self.world.close()  # what was under way on these ranks is unknown
        return verdict


def _told(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("rank*.txt")):
        yield f"--- {path.stem} ---\n{path.read_text()}"


def _agreed(outcomes: list[Outcome]) -> Verdict:
    kinds = {outcome.kind for outcome in outcomes}
    if kinds == {"refused"}:
        texts = sorted({outcome.text for outcome in outcomes})
        if all(is_expected(text) for text in texts):
            return Verdict("refused", texts[0])
        return Verdict("unexpected refusal", "\n".join(texts))
    if len(kinds) == 1:
        # Of several ranks, the one that says most.
        return Verdict(kinds.pop(), max((o.text for o in outcomes), key=len))
    parts = [f"rank {rank}: {o.kind}: {o.text}" for rank, o in enumerate(outcomes)]
    if kinds == {"passed", "raised"} or "raised" in kinds:
        return Verdict("raised", "on some ranks\n" + "\n".join(parts))
    return Verdict("ranks differ", "\n".join(parts))
