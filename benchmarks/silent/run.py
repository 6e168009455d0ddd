"""The cells of one engine: ``python -m benchmarks.silent.run ENGINE RESULTS [CASE ...]``."""

from __future__ import annotations

import json
import logging
import multiprocessing
import queue
import sys
import tempfile
import textwrap
import warnings
from contextlib import suppress
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.silent.cases import CASES, Case, DifferentError
from benchmarks.silent.engines import ENGINES, Engine, NotApplicableError, as_launched

SECONDS, SECONDS_OF_OTHERS = 90.0, 5.0
NOTHING_OF_THE_KIND = "-"
LONGEST_LOG = 100_000
Answer = tuple[int, str, str, list[str]]
"""Of a rank: its number, what is wrong, what it raised, what it warned of."""

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
_PEER_GONE = ("Connection", "Read error", "Broken pipe", "timed out", "Timed out")
"""Parts of errors that say no more than that another rank has ended."""


def _rank(rank: int, store: str, engine: Engine, case: Case, answers: Any) -> None:
    torch.set_num_threads(1)
    as_launched(rank, case.ranks)
    heard = BufferingHandler(LONGEST_LOG)
    heard.setLevel(logging.WARNING)
    logging.getLogger().addHandler(heard)
    wrong = refused = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        url = f"file://{store}"
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=case.ranks)
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
    answers.put((rank, wrong, refused, [*said, *(record.getMessage() for record in heard.buffer)]))
    answers.close()
    answers.join_thread()


def verdict(engine: Engine, case: Case) -> dict[str, str]:
    """Run one cell in ranks of its own."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        given = (f"{folder}/store", engine, case, answers)
        ranks = [context.Process(target=_rank, args=(r, *given)) for r in range(case.ranks)]
        for process in ranks:
            process.start()
        got: list[Answer] = []
        seconds = SECONDS
        with suppress(queue.Empty):  # a hang is a verdict too
            while len(got) < len(ranks):
                got.append(answers.get(timeout=seconds))
                if got[-1][1] or got[-1][2]:  # the others may wait for this rank
                    seconds = SECONDS_OF_OTHERS
        for process in ranks:
            process.kill() if len(got) < len(ranks) else process.join(5)
            process.kill()
    return classify(sorted(got), case.ranks)


def classify(got: list[Answer], ranks: int) -> dict[str, str]:
    """Refused before wrong; what only says that a peer has gone counts last."""
    wrong = [f"rank {rank}: {text}" for rank, text, _, _ in got if text]
    refused = [(rank, text) for rank, _, text, _ in got if text]
    if any(text == NOTHING_OF_THE_KIND for _, text in refused):
        return {"verdict": NOTHING_OF_THE_KIND, "output": ""}
    own = [each for each in refused if not any(part in each[1] for part in _PEER_GONE)]
    if own or (refused and not wrong):
        rank, text = (own or refused)[0]
        return {"verdict": "refuses", "output": _short(f"rank {rank}: {text}")}
    if not wrong and len(got) < ranks:
        return {"verdict": "hangs", "output": f"no answer in {SECONDS:.0f} s"}
    if not wrong:
        return {"verdict": "right", "output": ""}
    said = [text for *_, every in got for text in every if not any(n in text for n in _NOISE)]
    if said:
        return {"verdict": "reports", "output": f"{_short(said[0])} ({_short(wrong[0])})"}
    return {"verdict": "silently wrong", "output": _short(wrong[0])}


_short = partial(textwrap.shorten, width=220, placeholder="...")


def main(name: str, file: str, *names: str) -> None:
    """Run the cases named, or all that the results lack, and save the results after each cell."""
    engine = next(e for e in ENGINES if e.name == name)
    results, cells = Path(file), {}
    if results.exists():
        cells = json.loads(results.read_text()).get("cells", {})
    for case in names or [each for each in CASES if each not in cells]:
        cells[case] = found = verdict(engine, CASES[case])
        print(f"{name:20} {case:20} {found['verdict']:15} {found['output']}", flush=True)
        kept = {each: cells[each] for each in CASES if each in cells}
        text = json.dumps({"versions": engine.versions(), "cells": kept}, indent=1)
        results.write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
