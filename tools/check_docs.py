"""Run the Python blocks of the documentation, as a reader would: page by page, top to bottom.

Usage: python tools/check_docs.py [PAGE ...]      (default: every README.md, and docs/)

A block that opens with ```python run is run. A block that opens with ```python alone is an error,
unless the nearest line above it is a comment `<!-- not run: reason -->`. The blocks of one page
share their names. A page that says `<!-- ranks: 2 -->` is run on that many ranks, as by torchrun.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import sys
import tempfile
import textwrap
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
FENCE = re.compile(
    r"^ *(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)\n(?P<body>.*?)(?:^ *(?P=fence) *$|\Z)",
    re.MULTILINE | re.DOTALL,
)
NOT_RUN = re.compile(r"^<!-- not run: \S.*-->$")
RANKS = re.compile(r"^<!-- ranks: (\d+) -->$", re.MULTILINE)
TIMEOUT_SECONDS = 300
AT_ONCE = 2
FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["torch.distributed.tensor", "torch._dynamo", "polyshard"]


@dataclass(frozen=True)
class Block:
    """A fenced Python block: where its code starts (from 1), its lines, and what the page says."""

    line: int
    code: tuple[str, ...]
    runs: bool
    excused: bool


def python_blocks(text: str) -> Iterator[Block]:
    """Find the Python blocks of a page in Markdown."""
    for fence in FENCE.finditer(text):
        words = fence["info"].split()
        if words and words[0] in {"python", "py"}:
            line = text.count("\n", 0, fence.start("body")) + 1
            code = tuple(textwrap.dedent(fence["body"]).splitlines())
            above = text[: fence.start()].rstrip().rpartition("\n")[2].strip()
            excused = NOT_RUN.match(above) is not None
            yield Block(line, code, runs="run" in words[1:], excused=excused)


def script(blocks: list[Block]) -> str:
    """Join blocks into a program whose line numbers are those of the page."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.code
    return "\n".join(lines) + "\n"


def run_page(page: Path) -> str | None:
    """Run the blocks of one page in an empty folder; what went wrong, or None."""
    text = page.read_text("utf-8")
    blocks = list(python_blocks(text))
    silent = [block for block in blocks if block.runs == block.excused]
    if silent:
        places = ", ".join(str(block.line - 1) for block in silent)
        return f"{page}: line {places}: say either ```python run or <!-- not run: reason -->"
    runnable = [block for block in blocks if block.runs]
    if not runnable:
        return None
    ranks = RANKS.search(text)
    groups = sum("init_process_group(" in line for block in runnable for line in block.code)
    if ranks and groups > 1:
        # the store of one torchrun job remembers where ranks of the first one were, and sends there
        return f"{page}: makes {groups} process groups in one job, which may hang: make one"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, f"{page.stem}.py")
        program.write_text(script(runnable), "utf-8")
        return _execute(page, program, ranks)


def _execute(page: Path, program: Path, ranks: re.Match[str] | None) -> str | None:
    """Run ``program`` in processes that are forked from one that has imported torch.

    [Note: pages in forks]
    Starting Python and torch takes longer than most pages do, and torchrun and its ranks do it
    three times. So ranks get here what torchrun gives them: its variables and its store.
    """
    size = int(ranks[1]) if ranks else 0
    variables = {"OMP_NUM_THREADS": "1", **os.environ}
    store: Any = None
    if size:
        from torch.distributed import TCPStore

        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
        variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
        variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    output = program.with_name(f".{program.stem}.output")
    processes = []
    for rank in range(max(size, 1)):
        own = variables | (dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) if size else {})
        process = FORKS.Process(target=_be_page, args=(program, own, output))
        process.start()
        processes.append(process)
    status = _wait_for(processes)
    if status is None:
        return f"{page}: still running after {TIMEOUT_SECONDS} s"
    if status:
        text = output.read_text("utf-8")
        return f"{page}: exit status {status} (line numbers are the page's)\n{text}"
    return None


def _wait_for(processes: list[Any]) -> int | None:
    """The first exit status that is not 0, if any; ``None`` after a time-out. None is left."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    left = list(processes)
    try:
        while left:
            ready = wait([process.sentinel for process in left], deadline - time.monotonic())
            if not ready:
                return None
            left = [process for process in left if process.sentinel not in ready]
            if status := next((p.exitcode for p in processes if p not in left and p.exitcode), 0):
                return int(status)
        return 0
    finally:
        for process in processes:
            process.kill()
            process.join()


def _be_page(program: Path, variables: dict[str, str], output: Path) -> None:
    """Run ``program`` as if Python had been started with it."""
    import torch

    from polyshard.errors import DifferentValuesWarning, IneffectiveSettingWarning

    torch.seed()  # a fork would begin with the numbers of its siblings, a new process does not
    for warning in (DifferentValuesWarning, IneffectiveSettingWarning):
        warnings.simplefilter("error", warning)  # what readers copy warns of nothing
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(program.parent)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv, sys.path[0] = [str(program)], str(program.parent)
    runpy.run_path(str(program), run_name="__main__")


def default_pages(root: Path) -> list[Path]:
    """The pages a reader finds: the README files and docs/."""
    patterns = ("README.md", "packages/*/README.md", "plugins/*/README.md", "docs/**/*.md")
    return [page for pattern in patterns for page in sorted(root.glob(pattern))]


def main(arguments: list[str]) -> int:
    """Run the pages; 1 if one fails."""
    pages = [Path(argument) for argument in arguments] or default_pages(ROOT)
    FORKS.set_forkserver_preload(PRELOADED)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        failures = [failure for failure in pool.map(run_page, pages) if failure]
    print("\n".join([*failures, f"docs: {len(pages) - len(failures)} of {len(pages)} pages pass"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
