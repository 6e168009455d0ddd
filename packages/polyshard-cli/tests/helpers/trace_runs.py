"""Small runs that are traced, and what is looked for in the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard import fully_shard
from polyshard_cli.trace import Trace

Event = dict[str, Any]
WIDTH = 24


def model_of(*plugins: object, mesh: DeviceMesh | None = None) -> Any:
    """Three units, the root among them; the second has a frozen parameter, no shard divides."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH), nn.LayerNorm(WIDTH))
    model[1].bias.requires_grad_(False)
    for layer in (model[0], model[1]):
        fully_shard(layer, mesh=mesh, plugins=plugins)
    return fully_shard(model, mesh=mesh, plugins=plugins)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, rank: int) -> list[float]:
    """Losses of so many steps."""
    torch.manual_seed(10 + rank)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, WIDTH)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def traced(folder: str, rank: int, count: int = 3, **given: Any) -> tuple[nn.Module, list[float]]:
    """Record ``count`` steps; the model, and its losses."""
    trace = Trace(folder, **given)
    model = model_of(trace)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with trace.recording(model, optimizer):
        losses = train(model, optimizer, count, rank)
    return model, losses


def events_of(path: str | Path) -> list[Event]:
    """What a JSON parser sees."""
    found: list[Event] = json.loads(Path(path).read_text("ascii"))["traceEvents"]
    return found


def spans(events: list[Event], kind: str) -> list[Event]:
    """Those of one kind."""
    return [e for e in events if e["ph"] == "X" and e["cat"] == kind]


def overlaps(events: list[Event]) -> Iterator[tuple[Event, Event]]:
    """Spans of one track that overlap without one being inside of the other."""
    tracks: dict[tuple[int, int], list[Event]] = {}
    for event in (e for e in events if e["ph"] == "X"):
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    for found in tracks.values():
        found.sort(key=lambda e: (e["ts"], -e["dur"]))
        for index, first in enumerate(found):
            for second in found[index + 1 :]:
                end = first["ts"] + first["dur"]
                if second["ts"] < end - 1e-3 and second["ts"] + second["dur"] > end + 1e-3:
                    yield first, second
