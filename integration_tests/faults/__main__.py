"""``python -m faults cells|peers|raises|soak`` (in ``integration_tests/``): what faults cost.

``cells`` runs the cells of the table and writes the seconds that the page of faults shows;
``peers`` runs its faults on torch's own FSDP2; ``raises`` injects exceptions at random; ``soak``
looks for what grows.
"""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path[:0] = [
    str(Path(__file__).parents[2] / part)
    for part in ("", "tools", "packages/polyshard/tests/helpers")
]

from benchmarks.result import RESULTS, About, Result, read  # noqa: E402
from fault_table import FAULT_CELLS, PEER_FAULTS, PEERS  # noqa: E402
from faults import raises, soak  # noqa: E402
from faults.cells import run_cell  # noqa: E402
from faults.peers import run_peer  # noqa: E402

NAMES = {"cpu": "cells", "sim": "device", "cuda": "cuda"}
"""Of the files of figures."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    cells = commands.add_parser("cells")
    cells.add_argument(
        "--only", nargs="+", default=[""], help="cells whose names hold one of these"
    )
    cells.add_argument(
        "--device", choices=("sim", "cuda"), default="sim", help="what device cells run on"
    )
    cells.add_argument("--missing", action="store_true", help="only those without a figure")
    peers = commands.add_parser("peers")
    peers.add_argument("--under", nargs="+", choices=PEERS, default=PEERS)
    peers.add_argument("--only", nargs="+", choices=("none", *PEER_FAULTS))
    many = commands.add_parser("raises")
    many.add_argument("--ranks", type=int, default=2)
    many.add_argument("--count", type=int, default=100)
    many.add_argument("--seed", type=int, default=0)
    long = commands.add_parser("soak")
    long.add_argument("--ranks", type=int, default=2)
    long.add_argument("--steps", type=int, default=2000)
    long.add_argument("--seed", type=int, default=0)
    for each in (cells, peers, many, long):
        each.add_argument(
            "--results", type=Path, default=RESULTS / "faults", help="folder of the JSON files"
        )
    return parser.parse_args()


def measure_cells(chosen: argparse.Namespace) -> int:
    """Figures are written after each cell: a run may be ended, and continues then."""
    known = {device: _known(chosen.results / f"{name}.json") for device, name in NAMES.items()}
    failed = 0
    for each in FAULT_CELLS:
        cell = each if each.device == "cpu" else replace(each, device=chosen.device)
        seconds = known[cell.device]
        if not any(part in cell.id for part in chosen.only) or (
            chosen.missing and cell.id in seconds
        ):
            continue
        try:
            with TemporaryDirectory(prefix="polyshard-faults-") as folder:
                shown = run_cell(cell, folder)
        except AssertionError as error:
            failed += 1
            print(f"{cell.id}: {error}", flush=True)
            continue
        seconds[cell.id] = [None if each is None else round(each, 2) for each in shown.seconds]
        print(f"{cell.id}: {seconds[cell.id]}", flush=True)
        write(NAMES[cell.device], "faults", {"seconds": seconds}, chosen.results)
    return failed


def measure_peers(chosen: argparse.Namespace) -> int:
    """As for cells; a run without a fault comes first, unless others are chosen."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end what was started
    path = chosen.results / "peers.json"
    found = dict(read(path).found) if path.exists() else {launcher: {} for launcher in PEERS}
    for launcher in chosen.under:
        for fault in chosen.only or ("none", *PEER_FAULTS):
            with TemporaryDirectory(prefix="polyshard-peers-") as folder:
                found[launcher][fault] = run_peer(launcher, fault, Path(folder))
            print(f"{launcher} {fault}: {found[launcher][fault]}", flush=True)
            write("peers", "peers", found, chosen.results)
    return 0


def _known(path: Path) -> dict[str, Any]:
    return dict(read(path).found["seconds"]) if path.exists() else {}


def measure_raises(chosen: argparse.Namespace) -> int:
    found = raises.summary(raises.measure(chosen.ranks, chosen.count, chosen.seed))
    print(found)
    write(f"raises-{chosen.ranks}", "raises", {"seed": chosen.seed, **found}, chosen.results)
    return int(found["within_1_s"] < found["raises"])


def measure_soak(chosen: argparse.Namespace) -> int:
    length = soak.Length(steps=chosen.steps, seed=chosen.seed)
    found = soak.measure(chosen.ranks, length)
    for rank, each in enumerate(found):
        print(f"rank {rank}: {each.failures} failures; growth {soak.growth(each)}")
        for sample in each.samples:
            print(f"  {sample}")
    figures = {"length": asdict(length), "ranks": [asdict(each) for each in found]}
    write("soak", "soak", figures, chosen.results)
    return 0


def write(name: str, kind: str, found: dict[str, Any], folder: Path) -> None:
    """With what it takes to repeat it."""
    about = About.here(f"python -m faults {' '.join(sys.argv[1:])}")
    Result(name, kind, about, found).write(folder)


COMMANDS = {
    "cells": measure_cells,
    "peers": measure_peers,
    "raises": measure_raises,
    "soak": measure_soak,
}

if __name__ == "__main__":
    options = arguments()
    sys.exit(COMMANDS[options.command](options))
