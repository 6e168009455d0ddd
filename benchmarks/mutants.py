"""Both engines without one of their waits, events or keep-alives, on the simulated device.

    python -m benchmarks mutants [--engines polyshard FSDP2] [--only WORD] [--json OUT]

A mutant is exposed when a short training ends in other numbers, or fails, in one of the device's
modes. What no training exposes is in the table with the reason, where it is known.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Found, table
from benchmarks.result import ROOT, filled
from benchmarks.scenarios import SCENARIOS
from benchmarks.sim import LIBRARIES
from polyshard_sim.testing import MODES, Ranks
from polyshard_testing import RankError
from polyshard_testing.streams.mutants import Mutant, mutants

RESULTS = ROOT / "benchmarks" / "results" / "simulated" / "mutants.json"
PAGE = ROOT / "docs" / "reference" / "simulated.md"
HANG_SECONDS = 10.0
MUTANTS_OF_A_RANK = 25
"""Then it is replaced: a process group can be connected anew after a reset only so often."""
_CORE = (
    "memory.streams", "transport.collective", "transport.collective_owners", "transport.custom",
    "transport.wrapped", "program.executor", "program.reduce", "program.unshard", "group.group",
    "engine.unit", "engine.hooks", "engine.step", "module.communication",
    "module.sharded",
)  # fmt: skip
_OFFLOAD = (
    "shards.host_storage", "shards.disk_storage", "shards.gradients", "shards.storage",
    "tiers.swap_file", "optimizer.pipeline",
)  # fmt: skip
_FSDP2 = ("_fsdp_collectives", "_fsdp_param", "_fsdp_param_group", "_fsdp_state", "_fully_shard")
_KEPT_BY_FSDP2 = ("AllGatherState", "AllReduceState", "ReduceScatterState")
"""What FSDP2 holds tensors in until an event: the first argument."""


@dataclass(frozen=True)
class Setting:
    """How the device runs."""

    mode: str
    strict: bool

    def __str__(self) -> str:
        """Its name in the table."""
        return f"{self.mode}, strict" if self.strict else self.mode


_ORDER = sorted(MODES, key=["lowest", "highest", "random", "threads"].index)
SETTINGS = {
    "polyshard": [Setting(mode, strict) for strict in (False, True) for mode in _ORDER],
    "FSDP2": [Setting(mode, False) for mode in _ORDER],  # strict is more than CUDA asks
}

_RECORDED = "recorded steps expose it: `test_stream_mutants.py`"
_RECORDED_COPIES = "recorded steps expose it: `test_copy_order.py`"
_NAMED_ALIKE = "orders nothing; only the name matches"
_FAILING = "runs where an optimizer's step fails: `test_step.py`"
_THREAD = "a thread and a file, no stream"
_REUSED = "needs the memory reused during the copy"
_GLOO = "a message of gloo: `test_gloo_waits.py` leaves it out"
HOST_MEMORY = ("settle()", "_take_held")
"""In names and texts of mutants about copies to and from the host."""
REASONS = {
    ("Reducer._tell", "frame.said.works.wait()"): _GLOO,
    ("Reducer._land", "pending.wait()"): "runs after a failure",
    ("Reducer._play_out", "pending.wait()"): _GLOO,
    ("FSDPModule.finalize_backward", "finalize(unit)"): "no scenario ends a backward by hand",
    (
        "Lane._submit",
        "launched(device)()",
    ): "for tiers that copy asynchronously: `test_pipeline_order.py`",
    ("Lane.settle", "future.result()"): _FAILING,
    ("Pipeline.run", "self.settle()"): _FAILING,
    ("Pipeline.settle", "lane.settle()"): _FAILING,
    ("DiskStorage._give_back", "opening.exception()"): _THREAD,
    ("_keep_sum", "frame.kept += (frame.total,)"): _REUSED,
    ("DiskStorage.hold", "super().hold(parameters)"): _NAMED_ALIKE,
    (
        "DiskStorage.hold",
        "self._checksums.hold(parameters, self._shard, None if fresh is None else fresh.cpu())",
    ): _NAMED_ALIKE,
    ("TierStorage.hold", "self.norms.hold(parameters, self._shard)"): _NAMED_ALIKE,
    ("TierStorage.place_gradient", "self.norms.record(gradient, placed)"): _NAMED_ALIKE,
}
"""Why mutants that nothing exposes are there, by function and text."""


def reason_for(mutant: Mutant) -> str:
    """What is known of one that nothing exposes; empty where nothing is."""
    if found := REASONS.get((mutant.function, mutant.text)):
        return found
    if any(word in f"{mutant.function} {mutant.text}" for word in HOST_MEMORY):
        return _RECORDED_COPIES
    if mutant.module.startswith("polyshard."):
        return _RECORDED
    if mutant.module.startswith(("polyshard_offload.shards.", "polyshard_offload.tiers.")):
        return _RECORDED_COPIES
    return ""


@cache
def mutants_of(engine: str) -> list[Mutant]:
    """All of them, in the same order in every process."""
    if engine == "FSDP2":
        modules = [f"torch.distributed.fsdp._fully_shard.{name}" for name in _FSDP2]
        return mutants(modules, _KEPT_BY_FSDP2)
    return mutants(
        [f"polyshard.{name}" for name in _CORE] + [f"polyshard_offload.{name}" for name in _OFFLOAD]
    )


# On ranks -------------------------------------------------------------------------------------


def outcome(engine: str, name: str) -> list[Tensor]:
    """What a scenario ends in, on the host."""
    with torch.device("sim"):
        found = SCENARIOS[engine][name](LIBRARIES[engine])
    return [tensor.detach().cpu().clone() for tensor in found]


@cache
def expected(engine: str, name: str) -> list[Tensor]:
    """What it ends in as the engine is."""
    return outcome(engine, name)


@contextmanager
def noting(engine: str, reached: set[str]) -> Iterator[None]:
    """Add the names of the functions that have mutants to ``reached`` when they are called."""
    sys.modules["_reached_by_mutants"] = reached  # type: ignore[assignment]
    with ExitStack() as undone:
        for mutant in {(m.module, m.function): m for m in mutants_of(engine)}.values():
            tree = ast.parse(Path(mutant.file).read_text())
            body = tree.body
            for part in mutant.function.split("."):
                node = next(n for n in body if getattr(n, "name", "") == part)
                body = node.body  # type: ignore[attr-defined]
            name = f"{mutant.module}.{mutant.function}"
            note = f"__import__('sys').modules['_reached_by_mutants'].add({name!r})"
            body.insert(0, ast.parse(note).body[0])
            ast.fix_missing_locations(tree)
            undone.enter_context(replace(mutant, tree=tree).applied())
        yield


def functions(rank: int, size: int, engine: str, name: str) -> set[str]:
    """Those with mutants that a scenario calls; in autograd's threads, too."""
    del rank, size
    reached: set[str] = set()
    with noting(engine, reached):
        outcome(engine, name)
    return reached


def digest(rank: int, size: int, engine: str, name: str) -> str:
    """Of what a scenario ends in; the same in every setting."""
    del rank, size
    parts = [tensor.float().numpy().tobytes() for tensor in expected(engine, name)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def judge(rank: int, size: int, engine: str, index: int, names: list[str]) -> str:
    """The first scenario that the mutant spoils on any rank."""
    del rank, size
    wanted = {name: expected(engine, name) for name in names}
    with mutants_of(engine)[index].applied():
        for name in names:
            found = outcome(engine, name)
            torch.accelerator.synchronize()
            equal = len(found) == len(wanted[name]) and all(map(torch.equal, found, wanted[name]))
            agreed = torch.tensor([int(equal)])
            dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
            if not agreed.item():
                return name
    return ""


# The driver -----------------------------------------------------------------------------------


def run(engine: str, only: str) -> list[dict[str, Any]]:
    """Each mutant, with what exposes it."""
    found = {i: m for i, m in enumerate(mutants_of(engine)) if only in str(m)}
    exposed: dict[int, dict[str, str]] = {}
    digests: dict[str, str] = {}
    reached: dict[str, set[str]] = {}
    for setting in SETTINGS[engine]:
        left = [index for index in found if index not in exposed]
        ranks = Ranks(2, collective_seconds=HANG_SECONDS, mode=setting.mode, strict=setting.strict)
        try:
            names = usable(ranks, engine, setting, digests)
            for name in [name for name in names if name not in reached]:
                reached[name] = ranks.run(functions, engine, name, timeout=120.0)[0]
            for count, index in enumerate(left):
                if count and count % MUTANTS_OF_A_RANK == 0:
                    ranks.close()
                place = f"{found[index].module}.{found[index].function}"
                calling = [name for name in names if place in reached[name]]
                if by := _exposing(ranks, engine, index, calling):
                    exposed[index] = {"setting": str(setting), **by}
                after = str(by) if by else f"survives {len(calling)} scenarios"
                print(setting, found[index], after, sep=": ", flush=True)
        finally:
            ranks.close()
    return [_row(m, exposed.get(i, {})) for i, m in found.items()]


def usable(ranks: Ranks, engine: str, setting: Setting, digests: dict[str, str]) -> list[str]:
    """Scenarios that end as in other settings while nothing is left out."""
    names = []
    for name in SCENARIOS[engine]:
        try:
            found = str(ranks.run(digest, engine, name, timeout=120.0))
        except RankError as error:
            print(f"{setting}: {name} fails as it is: {_last_line(error)}", flush=True)
            continue
        if digests.setdefault(name, found) == found:
            names.append(name)
        else:
            print(f"{setting}: {name} ends in other numbers as it is", flush=True)
    return names


def _exposing(ranks: Ranks, engine: str, index: int, names: list[str]) -> dict[str, str]:
    try:
        spoiled = ranks.run(judge, engine, index, names, timeout=300.0)[0]
    except RankError as error:
        return {"how": _last_line(error)}
    return {"how": f"numbers of `{spoiled}`"} if spoiled else {}


def _last_line(error: RankError) -> str:
    lines = [line for line in str(error).splitlines() if line and not line.startswith(("-", " "))]
    return lines[-1][:160] if lines else "hangs"


def _row(mutant: Mutant, exposed: dict[str, str]) -> dict[str, Any]:
    place = f"{mutant.module}.{mutant.function}"
    row: dict[str, Any] = {"place": place, "kind": mutant.kind, "text": mutant.text, **exposed}
    if not exposed:
        row["reason"] = reason_for(mutant)
    return row


def lines(results: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """The tables of the page, which count reasons; the JSON has each mutant's."""
    counts, reasons = [], []
    for engine, rows in results.items():
        exposed = [row for row in rows if "setting" in row]
        numbers = sum(row["how"].startswith("numbers") for row in exposed)
        other = (len(exposed) - numbers, len(rows) - len(exposed))
        counts.append([engine, *map(str, (len(rows), len(exposed), numbers, *other))])
        why = Counter(row["reason"] or "not known" for row in rows if "setting" not in row)
        reasons += [(engine, str(count), reason) for reason, count in why.most_common()]
    heads = ("left out", "exposed", "with numbers", "with an error or a hang", "not exposed")
    yield from table(("engine", *heads), counts)
    yield ""
    yield from table(("engine", "not exposed", "reason"), reasons)


@dataclass(frozen=True)
class Case(harness.Case):
    """Engines, and a part of the mutants' names."""

    engines: tuple[str, ...] = tuple(LIBRARIES)
    only: str = ""

    def measure(self) -> Found:
        """Each engine's mutants; all of them are the table of the page, too."""
        results = {engine: run(engine, self.only) for engine in self.engines}
        print(*lines(results), sep="\n")
        if self == Case():
            RESULTS.write_text(json.dumps({"simulated": True, **results}, indent=1) + "\n", "utf-8")
            page = PAGE.read_text("utf-8")
            PAGE.write_text(filled(page, {"mutants": lines(results)}), "utf-8")
        return results
