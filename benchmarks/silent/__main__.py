"""``python -m benchmarks.silent``: runs the table of silent errors and writes its page.

``--python ENGINE=PATH`` starts the cases of an engine with the Python of another environment, so
that engines that need other libraries, or another torch, stand in one table.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import platform
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.silent.cases import CASES, Case, DifferentError
from benchmarks.silent.engines import ENGINES, Engine, NotApplicableError, as_launched

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "silent" / "table.json"
PAGE = ROOT / "docs" / "reference" / "silent-errors.md"
SECONDS = 120.0
NOTHING_OF_THE_KIND = "-"
NOT_ON_CPU = {
    "Megatron-FSDP": "megatron-fsdp 0.6.1 asks for `torch.cuda.current_device()` while it shards: "
    "`AssertionError: Torch not compiled with CUDA enabled`",
}
Verdict = dict[str, str]


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(record.getMessage())


def _rank(rank: int, ranks: int, store: str, engine: Engine, case: Case, answers: Any) -> None:
    """One rank of one cell: what it raised, what it warned of, what it computed wrongly."""
    torch.set_num_threads(1)
    as_launched(rank, ranks)
    heard = _Heard()
    logging.getLogger().addHandler(heard)
    wrong = refused = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        torch.manual_seed(0)
        try:
            case.run(engine)
        except DifferentError as difference:
            wrong = str(difference)
        except NotApplicableError:
            refused = NOTHING_OF_THE_KIND
        except Exception as error:  # the verdict is about any of them
            refused = f"{type(error).__name__}: {error}"
    said = [str(w.message) for w in caught if not issubclass(w.category, _UNRELATED)]
    answers.put((rank, wrong, refused, [*said, *heard.text]))
    answers.close()
    answers.join_thread()


_UNRELATED = (DeprecationWarning, FutureWarning, ResourceWarning)
_NOISE = (
    "TORCHELASTIC_RUN_ID",
    "Found keys that are not in the model state dict",
    "OMP_NUM_THREADS",
    "lr_scheduler.step",
    "FSDP upcast",
    "Upcasted low precision",
    "torch.distributed.reduce_op",
    "not a CUDA device",
    "sequential all_gather operations",
)
"""Parts of warnings that appear whatever the case is, and say nothing of it."""


def verdict(engine: Engine, case: Case) -> Verdict:
    """Runs one cell in ranks of its own."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        ranks = [
            context.Process(
                target=_rank, args=(r, case.ranks, f"{folder}/store", engine, case, answers)
            )
            for r in range(case.ranks)
        ]
        for process in ranks:
            process.start()
        got = []
        try:
            for _ in ranks:
                got.append(answers.get(timeout=SECONDS))
                if got[-1][2]:  # the others may wait for this rank
                    break
        except Exception:  # queue.Empty: a hang is a verdict too
            got.append((-1, "", "", []))
        for process in ranks:
            process.kill() if len(got) < len(ranks) else process.join(5)
            process.kill()
    return classify(got, case.ranks)


def classify(got: list[tuple[int, str, str, list[str]]], ranks: int) -> Verdict:
    """Refused before wrong, and wrong with a warning is reported."""
    for rank, _, refused, _ in got:
        if refused == NOTHING_OF_THE_KIND:
            return {"verdict": "-", "output": ""}
        if refused:
            return {"verdict": "refuses", "output": f"rank {rank}: {_short(refused)}"}
    if any(rank < 0 for rank, *_ in got) or len(got) < ranks:
        return {"verdict": "hangs", "output": f"no answer in {SECONDS:.0f} s"}
    wrong = next((f"rank {rank}: {w}" for rank, w, _, _ in got if w), "")
    if not wrong:
        return {"verdict": "right", "output": ""}
    every = (text for *_, texts in got for text in texts)
    said = [text for text in every if not any(noise in text for noise in _NOISE)]
    if said:
        return {"verdict": "reports", "output": f"{_short(said[0])} ({_short(wrong)})"}
    return {"verdict": "silently wrong", "output": _short(wrong)}


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 220 else line[:217] + "..."


def run_here(engine: Engine, cases: dict[str, Case]) -> dict[str, Any]:
    """What an engine makes of ``cases`` in this environment, or why it cannot run."""
    if why := engine.why_not():
        return {"not_run": why}
    cells = {}
    for name, case in cases.items():
        cells[name] = found = verdict(engine, case)
        print(
            f"{engine.name:20} {name:20} {found['verdict']:15} {found['output']}",
            flush=True,
        )
    return {"versions": engine.versions, "cells": cells}


def run_elsewhere(engine: Engine, cases: dict[str, Case], python: str) -> dict[str, Any]:
    """The same with the Python of another environment."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        arguments = [f"--engine={engine.name}", *(f"--case={name}" for name in cases)]
        subprocess.run(
            [python, "-m", "benchmarks.silent", *arguments, f"--answer={answer}"],
            check=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        found: dict[str, Any] = json.loads(answer.read_text())[engine.name]
    return found


COUNTED = ("right", "refuses", "reports", "hangs", "silently wrong")


def page(results: dict[str, Any]) -> str:
    """The table, a line of counts, versions, and every output that is not just "right"."""
    engines = [name for name, found in results["engines"].items() if "cells" in found]
    cells = {name: results["engines"][name]["cells"] for name in engines}
    lines = [HEAD, "| | " + " | ".join(engines) + " |", "|---" * (len(engines) + 1) + "|"]
    for name, case in CASES.items():
        row = [cells[e][name]["verdict"] for e in engines]
        row = [f"**{v}**" if v == "silently wrong" else v for v in row]
        lines.append(f"| {case.title} ({case.source}) | " + " | ".join(row) + " |")
    for kind in COUNTED:
        counts = [sum(c["verdict"] == kind for c in cells[e].values()) for e in engines]
        lines.append(f"| *{kind}, of {len(CASES)}* | " + " | ".join(map(str, counts)) + " |")
    lines += ["", "## Versions", "", f"Python {results['python']}, gloo.", ""]
    lines += [f"- {e}: {results['engines'][e]['versions']}" for e in engines]
    left_out = {e: f["not_run"] for e, f in results["engines"].items() if "not_run" in f}
    lines += [f"- {e}: not run; {why}" for e, why in {**left_out, **NOT_ON_CPU}.items()]
    lines += ["", "## Outputs", ""]
    for name, case in CASES.items():
        outputs: dict[str, list[str]] = {}
        for e in engines:
            kind, output = cells[e][name]["verdict"], cells[e][name]["output"]
            if output:
                outputs.setdefault(f"{kind}: `{output.replace('`', chr(39))}`", []).append(e)
        if outputs:
            lines += [f"{case.title}:", ""]
            lines += [f"- {', '.join(names)} {text}" for text, names in outputs.items()]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


HEAD = """# Silent errors

Each row is a mistake of a library or of its user that some engine has met without an error; the
source in brackets is where. Each is a short function of `benchmarks/silent/cases.py` with an
oracle: one process with the global batch, or arithmetic. Ranks of gloo run it with each engine,
used as the engine's documentation says.

| | |
|---|---|
| right | the numbers are the oracle's |
| refuses | some rank raises an exception |
| reports | the numbers are wrong, and a warning says something |
| hangs | no rank answers within two minutes |
| **silently wrong** | the numbers are wrong, and nothing is said |
| - | the engine has nothing that the case is about |
| not run | the machine had no time left for it; `--python` and `--engine` run it |

No engine can make a case of misuse right, unless it does not need what was left out; there, a
refusal or a report is what one hopes for. Columns of other libraries say something of the way
this benchmark uses them, too: accelerate uses FSDP2 on accelerators alone, so here its state is
told that the job is one; Lightning is `Fabric` with `ModelParallelStrategy`; DeepSpeed is ZeRO-3.
Cases that need an interface like FSDP2's (`set_reshard_after_backward`, meta devices,
`set_requires_all_reduce`) run with polyshard and FSDP2 alone.

To run it: `python -m benchmarks.silent`, with `--engine`, `--case` for parts of it (nothing is
written then), and `--python ENGINE=PATH` for engines that are installed in another environment.
"""


def main() -> None:
    """Runs what was asked for; the whole table is written down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", action="append", default=[])
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    pythons = dict(text.split("=", 1) for text in asked.python)
    if unknown := {*asked.engine, *pythons} - {e.name for e in ENGINES}:
        parser.error(f"no engine {sorted(unknown)}; there are {[e.name for e in ENGINES]}")
    if unknown := {*asked.case} - CASES.keys():
        parser.error(f"no case {sorted(unknown)}; there are {list(CASES)}")
    cases = {name: c for name, c in CASES.items() if not asked.case or name in asked.case}
    found: dict[str, Any] = {}
    for engine in ENGINES:
        if not asked.engine or engine.name in asked.engine:
            python = pythons.get(engine.name)
            found[engine.name] = (
                run_elsewhere(engine, cases, python) if python else run_here(engine, cases)
            )
    if asked.answer:
        asked.answer.write_text(json.dumps(found))
    elif not asked.engine and not asked.case:
        results = {"python": platform.python_version(), "engines": found}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
