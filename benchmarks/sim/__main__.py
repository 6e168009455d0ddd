"""Both engines on the simulated accelerator: memory by phase, launches, host waits, bytes.

    python -m benchmarks.sim [--rows fp32 bf16 ...] [--json OUT]

Simulated: kernels are the CPU's, and the allocator follows CUDA's rules. Bytes and counts say what
the engines ask of a device; no time is measured. Needs polyshard-sim.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.sim.measure import ENGINES, MIB, ROWS, measure
from polyshard.testing import World

RESULTS = Path(__file__).parents[1] / "results" / "sim.json"
COLUMNS = ("at_rest", "forward", "backward", "peak", "reserved", "launches", "host_waits")


def run(names: list[str]) -> dict[str, Any]:
    """Figures of rank 0, by row and engine."""
    worlds: dict[int, World] = {}
    found: dict[str, Any] = {}
    try:
        for name in names:
            size = ROWS[name].ranks
            if size not in worlds:
                worlds[size] = World(size, device="sim", start_method="spawn")
            found[name] = {e: worlds[size].run(measure, name, e, timeout=600)[0] for e in ENGINES}
            print(*lines(name, found[name]), sep="\n", flush=True)
    finally:
        for world in worlds.values():
            world.close()
    return found


def lines(name: str, row: dict[str, dict[str, Any]]) -> list[str]:
    """A row of the table that is printed, and of the one on the page."""
    ours, theirs = (row[engine] for engine in ENGINES)
    cells = [" / ".join(_text(side[c]) for side in (ours, theirs)) for c in COLUMNS]
    cells.append(" / ".join(_text(side["collective_bytes"] / MIB) for side in (ours, theirs)))
    ratio = max(ours["forward"], ours["backward"]) / max(theirs["forward"], theirs["backward"])
    same = "bitwise" if ours["losses"] == theirs["losses"] else "differ"
    return ["| " + " | ".join([f"`{name}`", *cells, f"{ratio:.3f}", same]) + " |"]


def _text(value: int | float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--json", type=Path, default=None, help=f"default with all rows: {RESULTS}")
    given = parser.parse_args()
    heads = ["row", *(c.replace("_", " ") for c in COLUMNS), "collectives MiB"]
    heads += ["peak of forward and backward / FSDP2", "losses"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|", flush=True)
    found = run(given.rows)
    path = given.json or (RESULTS if given.rows == list(ROWS) else None)
    if path is not None:
        path.write_text(json.dumps({"simulated": True, "rows": found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
