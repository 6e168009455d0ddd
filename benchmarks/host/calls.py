"""How much code a tensor passes: calls and files of one unit's forward and backward, and lines.

``python -m benchmarks host.calls`` counts the Python functions of core that run for one more unit
of a model (a model's, less those of a model with a unit fewer): on two gloo ranks, and on
collectives of torch's fake process group, which stand for a device's. ``--list`` names them.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import polyshard
from benchmarks import harness
from benchmarks.harness import Found, Layer, run_alone, run_ranks

CORE = Path(polyshard.__file__).parent
Calls = Counter[tuple[str, str]]
"""By file and function."""
WIDTH = 64


def calls_of(run: Callable[[], object]) -> Calls:
    """What ``run`` calls of core, in threads that it starts too."""
    found: Calls = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        del argument
        if event == "call" and frame.f_code.co_filename.startswith(str(CORE)):
            file = frame.f_code.co_filename.removeprefix(f"{CORE}/")
            found[file, frame.f_code.co_qualname] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def step(units: int, parameters: int) -> tuple[Calls, Calls]:
    """Calls of a step's forward and backward, when everything is made."""
    model = nn.Sequential(*(Layer(parameters, WIDTH, WIDTH) for _ in range(units)))
    for module in (*model, model):
        polyshard.fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, WIDTH)
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    losses: list[Tensor] = []
    forward = calls_of(lambda: losses.append(model(x).sum()))
    return forward, calls_of(losses[0].backward)


def one_unit(parameters: int) -> tuple[Calls, Calls]:
    """What one unit more adds to each."""
    (few_forward, few_backward), (forward, backward) = step(3, parameters), step(4, parameters)
    return forward - few_forward, backward - few_backward


def on_collectives(parameters: int) -> tuple[Calls, Calls]:
    """The same in a process group that moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return one_unit(parameters)


def size_of_core() -> dict[str, int]:
    """Lines, files, functions and classes of core."""
    sources = [path.read_text() for path in sorted(CORE.rglob("*.py"))]
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    return {
        "lines": sum(source.count("\n") for source in sources),
        "files": len(sources),
        "functions": sum(isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in nodes),
        "classes": len(classes),
        "dataclasses": sum("dataclass" in map(_name, c.decorator_list) for c in classes),
        "protocols": sum("Protocol" in map(_name, c.bases) for c in classes),
    }


def _name(node: ast.expr) -> str:
    while isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return ast.unparse(node)


@dataclass(frozen=True)
class Case(harness.Case, parameters=(1,)):
    """Parameters of the unit on collectives; whether every function is named."""

    parameters: tuple[int, ...] = (1, 4, 8)
    list: bool = False

    def measure(self) -> Found:
        """Sizes of core, and calls and files by way and phase."""
        ways = {"gloo, 1 parameters": run_ranks(2, one_unit, 1)}
        for count in self.parameters:
            ways[f"collectives, {count} parameters"] = run_alone(on_collectives, count)
        found: Found = {"core": size_of_core()}
        for way, both in ways.items():
            for phase, calls in zip(("forward", "backward"), both, strict=True):
                files = len({file for file, _ in calls})
                found[f"{way}, {phase}"] = {"calls": calls.total(), "files": files}
                if self.list:
                    named = {" ".join(key): count for key, count in sorted(calls.items())}
                    found[f"{way}, {phase}"]["by function"] = named
        return found
