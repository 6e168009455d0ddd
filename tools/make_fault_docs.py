"""The tables of docs/reference/faults.md, from the table of faults and the measured seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fault_table import (
    AGAIN,
    BAR_SECONDS,
    CHECKPOINT,
    COLUMNS,
    FAULT_CELLS,
    FAULTS,
    PEER_FAULTS,
    PEER_TIMEOUT_SECONDS,
    PEERS,
    TIMEOUT_SECONDS,
    Column,
    Fault,
    FaultCell,
    Way,
    verdict,
)
from write_pages import page_with, table

Columns = tuple[Column, ...]
ON_DEVICE: Columns = tuple(column for column in COLUMNS if column[2] != "cpu")
WITH: Columns = tuple(column for column in COLUMNS if "tensor-parallel" in column[0])
WITHOUT: Columns = tuple(c for c in COLUMNS if c not in WITH and c not in ON_DEVICE)
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "faults.md"
FIGURES = ROOT / "benchmarks" / "results" / "faults"


def _limits() -> str:
    return (
        f"- Ranks raise within {BAR_SECONDS:.0f} s; the process group's time-out is "
        f"{TIMEOUT_SECONDS:.0f} s.\n"
        f"- {len(FAULT_CELLS)} combinations of fault and plugins are tests."
    )


def _measured() -> tuple[dict[str, list[float | None]], str]:
    """Seconds of each cell, and where they were measured."""
    names = ("cells", "device", "cuda")
    files = [json.loads((FIGURES / f"{name}.json").read_text("utf-8")) for name in names]
    seconds = {cell: times for each in files for cell, times in each["found"]["seconds"].items()}
    first, *others = (_place(each["about"]) for each in files)
    places = zip(("the simulated device", "an H100"), others, strict=True)
    return seconds, ". ".join([first, *(f"On {device}: {where}" for device, where in places)])


def _place(about: dict[str, Any]) -> str:
    machine = about["machine"].partition(", Linux")[0]
    return f"{machine}, {about['date']}, torch {about['versions']['torch']}"


def _seen() -> str:
    seconds, measured = _measured()
    alike: dict[tuple[str, str, tuple[str, ...]], list[Fault]] = {}
    for fault in FAULTS:
        alike.setdefault((fault.struck, fault.peers, fault.words), []).append(fault)
    rows = [
        [
            "; ".join(f"*{fault.id}*: {fault.what}" for fault in faults),
            f"`{struck}`" if struck else "–",
            f"`{peers}`",
            " … ".join(f"`{each}`" for each in words if each not in (AGAIN, CHECKPOINT)),
            *(_range(faults, columns, seconds) for columns in (WITHOUT, WITH, ON_DEVICE)),
            _on_gpu(faults, seconds),
        ]
        for (struck, peers, words), faults in alike.items()
    ]
    seen = ["fault", "the rank itself", "all others", "text"]
    headings = [*seen, "seconds", "with TP", "simulated", "GPU"]
    return f"{table(headings, rows)}\nMeasured beside other programs, on {measured}."


def _range(faults: list[Fault], columns: Columns, seconds: dict[str, list[float | None]]) -> str:
    every = (FaultCell(fault, *column) for fault in faults for column in columns)
    cells = [cell for cell in every if cell in FAULT_CELLS]
    cells += [c for c in (replace(cell, in_attempt=True) for cell in cells) if c in FAULT_CELLS]
    return _span([max(each for each in seconds[cell.id] if each is not None) for cell in cells])


def _on_gpu(faults: list[Fault], seconds: dict[str, list[float | None]]) -> str:
    """Of the simulated device's cells, those that were tried there."""
    every = (
        FaultCell(fault, *column, tried)
        for tried in (False, True)
        for fault in faults
        for column in ON_DEVICE
    )
    cells = [replace(cell, device="cuda") for cell in every]
    found = [seconds[cell.id] for cell in cells if cell.id in seconds]
    return _span([max(each for each in times if each is not None) for times in found])


def _span(found: list[float]) -> str:
    low, high = (f"{end(found):.2f}" for end in (min, max)) if found else ("–", "–")
    return low if low == high else f"{low}–{high}"


def _peers() -> str:
    """What the same faults do to torch's own; faults that do alike share a row."""
    result = json.loads((FIGURES / "peers.json").read_text("utf-8"))
    alone, groups = (result["found"][launcher] for launcher in PEERS)
    alike: dict[tuple[object, ...], list[str]] = {}
    for fault in PEER_FAULTS:
        alike.setdefault((*verdict(alone[fault]), *verdict(groups[fault])), []).append(fault)
    rows = [
        [
            ", ".join(f"*{fault}*" for fault in faults),
            _alone([alone[fault] for fault in faults], alone["none"]),
            *_in_groups([groups[fault] for fault in faults]),
        ]
        for faults in alike.values()
    ]
    headings = ["fault", "torchrun: the other rank", "torchft: the other group", "the struck group"]
    about = result["about"]
    cores = about["machine"].split(", ")[1]
    return (
        f"{table(headings, rows)}\n"
        f"`python -m faults peers`, {about['date']}, on {cores}, busy, with time-outs of "
        f"{PEER_TIMEOUT_SECONDS:.0f} s (torch's default: 30 min)."
    )


def _alone(found: list[dict[str, Any]], undisturbed: dict[str, Any]) -> str:
    if found[0]["goes_on"]:
        same = all(each["digests"] == undisturbed["digests"] for each in found)
        return "no error, " + ("right" if same else "other") + " weights"
    seen = [each["beside"] for each in found]
    if verdict(found[0]).has_waited:
        return f"time-out, {_seconds(seen)}"
    return f"{' or '.join(sorted({each['saw'] for each in seen}))}, {_seconds(seen)}"


def _in_groups(found: list[dict[str, Any]]) -> tuple[str, str]:
    if not found[0]["is_restarted"]:
        same = all(each["same_weights"] for each in found)
        return "no error", "no error" if same else "no error; its weights differ"
    goes_on = found[0]["goes_on"]
    other = f"pauses {_seconds(found, 'pause_seconds')}" if goes_on else "ends too"
    return other, f"back after {_seconds(found, 'back_seconds')}"


def _seconds(found: list[dict[str, Any]], key: str = "seconds") -> str:
    low, high = (f"{end(each[key] for each in found):.1f}" for end in (min, max))
    return f"{low if low == high else f'{low}–{high}'} s"


def _ways() -> str:
    rows = [
        [", ".join(f"*{fault.id}*" for fault in FAULTS if fault.way is way), way.value]
        for way in Way
        if way is not Way.RESTART
    ]
    rows.append(["all others", Way.RESTART.value])
    return table(["faults", "how to continue"], rows)


def files() -> dict[Path, str]:
    """The page."""
    return page_with(PAGE, limits=_limits(), seen=_seen(), peers=_peers(), ways=_ways())
