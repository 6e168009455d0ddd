"""``python -m benchmarks.silent``: runs the table of silent errors and writes its page.

Each engine runs in a process of its own, with the Python of an environment that has it: this one,
or one that is made in ``runs/silent``. Results are saved cell by cell in a file an engine
(``benchmarks/results/silent``). ``--resume`` runs the cells that are missing there, and ``--case``
runs a case again; the page is always made of all files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import table
from benchmarks.result import ROOT, filled
from benchmarks.silent.cases import CASES
from benchmarks.silent.engines import ENGINES, ENVIRONMENTS, NOT_RUN, Engine

RESULTS = ROOT / "benchmarks" / "results" / "silent"
PAGE = ROOT / "docs" / "reference" / "silent-errors.md"


def python_of(engine: Engine) -> str:
    """The Python of the engine's environment, which is made where it is not there yet.

    Raises:
        CalledProcessError: when pip fails.
    """
    if not engine.environment:
        return sys.executable
    folder = ROOT / "runs" / "silent" / engine.environment
    python, is_there = folder / "bin" / "python", folder / "installed"
    if not is_there.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *ENVIRONMENTS[engine.environment]], check=True)
        is_there.touch()
    return str(python)


def run(engine: Engine, file: Path, cases: list[str]) -> None:
    """Run ``cases``, or all that ``file`` lacks; where that cannot be, the file says why."""
    own = {} if engine.environment else {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", **own}
    what = ["-m", "benchmarks.silent.run", engine.name, str(file), *cases]
    try:
        subprocess.run([python_of(engine), *what], check=True, cwd=ROOT, env=environment)
    except subprocess.CalledProcessError as error:
        why = f"{error.cmd[1:4]} ended with {error.returncode}"
        file.write_text(json.dumps({"not_run": why}, indent=1) + "\n")


def slug(name: str) -> str:
    """An engine's name in file names."""
    return name.lower().replace(" of torch ", "-")


def load(folder: Path = RESULTS) -> dict[str, Any]:
    """All results, by engine."""
    files = {engine.name: folder / f"{slug(engine.name)}.json" for engine in ENGINES}
    return {name: json.loads(f.read_text()) for name, f in files.items() if f.exists()}


SIGNS = {"right": "✔", "silently wrong": "**silent**", "-": "–"}
COUNTED = ("right", "refuses", "reports", "hangs", "silently wrong")


def page(results: dict[str, Any]) -> str:
    """The page, whose table and list of versions are of ``results``."""
    parts = {"cells": _table(results), "versions": _versions(results)}
    return filled(PAGE.read_text("utf-8"), parts)


def _table(results: dict[str, Any]) -> Iterator[str]:
    """With counts; names of engines link to the outputs of cells."""
    cells = {name: found["cells"] for name, found in results.items() if "cells" in found}
    heads = [f"[{e}](../../benchmarks/results/silent/{slug(e)}.json)" for e in cells]
    rows = [
        [
            f"{case.title} ({', '.join(map(_link, case.source.split(', ')))})",
            *(_cell(found.get(name), e in case.against) for e, found in cells.items()),
        ]
        for name, case in CASES.items()
    ]
    for kind in COUNTED:
        counts = [sum(c["verdict"] == kind for c in found.values()) for found in cells.values()]
        rows.append([f"*{kind}, of {len(CASES)}*", *map(str, counts)])
    yield from table(["", *heads], rows)


def _versions(results: dict[str, Any]) -> Iterator[str]:
    yield from (f"- {e}: {found['versions']}" for e, found in results.items() if "cells" in found)
    not_run = {e: found["not_run"] for e, found in results.items() if "not_run" in found}
    yield from (f"- {e}: not run; {why}" for e, why in {**not_run, **NOT_RUN}.items())


def _cell(found: dict[str, str] | None, is_against: bool) -> str:
    kind = "not run" if found is None else found["verdict"]
    return SIGNS.get(kind, kind) + (" †" if is_against and kind not in {"right", "-"} else "")


REPOSITORIES = {
    "pytorch": "pytorch/pytorch",
    "accelerate": "huggingface/accelerate",
    "verl": "verl-project/verl",
    "torchtitan": "pytorch/torchtitan",
    "axolotl": "axolotl-ai-cloud/axolotl",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "TransformerEngine": "NVIDIA/TransformerEngine",
    "DeepSpeed": "deepspeedai/DeepSpeed",
    "mmpretrain": "open-mmlab/mmpretrain",
}


def _link(text: str) -> str:
    """A thread or a paper, as a link where the address is known."""
    repository, _, number = text.removeprefix("TrainCheck's ").partition("#")
    if text.startswith("arXiv "):
        return f"[{text}](https://arxiv.org/abs/{text[6:]})"
    if repository in REPOSITORIES:
        return f"[{text}](https://github.com/{REPOSITORIES[repository]}/issues/{number})"
    return text


def main() -> None:
    """Run what was asked for, and make the page of all results."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [engine.name for engine in ENGINES]
    parser.add_argument("--engine", action="append", choices=names, default=[])
    parser.add_argument("--case", action="append", choices=list(CASES), default=[])
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS, help="no page is made of others")
    asked = parser.parse_args()
    for engine in ENGINES:
        file = asked.results / f"{slug(engine.name)}.json"
        if asked.engine and engine.name not in asked.engine:
            continue
        if not (asked.resume or asked.case):
            file.unlink(missing_ok=True)
        run(engine, file, asked.case)
    if asked.results == RESULTS:
        PAGE.write_text(page(load()))


if __name__ == "__main__":
    main()
