"""A longer session: ``python -m fuzzing --cases 2000 --seed 1`` (in ``integration_tests/``)."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from fuzzing.case import Case
from fuzzing.draw import draw
from fuzzing.program import program
from fuzzing.session import Session, Verdict
from fuzzing.shrink import shrink


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzzing", description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the session")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds for each finding")
    parser.add_argument("--save", type=Path, help="folder for the programs of findings")
    return parser.parse_args()


def main() -> int:
    """1 if something was found."""
    chosen = arguments()
    session = Session()
    counts: Counter[str] = Counter()
    signatures: dict[str, int] = {}
    start = time.monotonic()
    number = chosen.first
    try:
        for number in range(chosen.first, chosen.first + chosen.cases):
            if time.monotonic() - start > chosen.seconds:
                break
            case = draw(chosen.seed, number)
            verdict = session.check(case)
            counts[verdict.kind] += 1
            if verdict.failed:
                signatures[verdict.signature] = signatures.get(verdict.signature, 0) + 1
                if signatures[verdict.signature] == 1:
                    report(session, chosen, number, case, verdict)
            if number % 25 == 24:
                spent = time.monotonic() - start
                print(f"[{spent:4.0f} s] {number + 1}: {dict(counts)}", flush=True)
    finally:
        session.close()
    for signature, count in sorted(signatures.items()):
        print(f"{count:4} x {signature}")
    print(f"{sum(counts.values())} cases to number {number}: {dict(counts)}")
    return 1 if signatures else 0


def report(
    session: Session, chosen: argparse.Namespace, number: int, case: Case, verdict: Verdict
) -> None:
    """Shrink and print a finding."""

    def fails(other: Case) -> bool:
        return session.check(other).signature == verdict.signature

    print(f"\ncase {number}: {verdict.signature}", flush=True)
    smallest = shrink(case, fails, chosen.shrink)
    again = session.check(smallest)
    said = again if again.failed else verdict
    title = f"seed {chosen.seed}, case {number}: {said.signature}"
    text = program(smallest, title)
    print(f"=== {title}\n{said.kind}: {said.text[-2500:]}\n--- program\n{text}", flush=True)
    if chosen.save is not None:
        chosen.save.mkdir(parents=True, exist_ok=True)
        path = chosen.save / f"seed{chosen.seed}_case{number}.py"
        path.write_text(f"{text}\n# {verdict.kind}\n" + _commented(said.text))


def _commented(text: str) -> str:
    return "".join(f"# {line}\n" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
