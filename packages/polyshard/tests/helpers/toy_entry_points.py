"""Installed plugins, as metadata says."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from polyshard.plugins import discovery


def install(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    points = tuple(EntryPoint(name, value, discovery.ENTRY_POINTS) for name, value in entries)
    only(monkeypatch, points)


def only(monkeypatch: pytest.MonkeyPatch, points: tuple[EntryPoint, ...]) -> None:
    """Nothing but ``points`` is installed."""
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: tuple(point for point in points if point.group == group),
    )


def install_from(monkeypatch: pytest.MonkeyPatch, site: Path) -> None:
    """What is in ``site`` and nothing else, whatever this environment holds."""
    found = [p for d in importlib.metadata.distributions(path=[str(site)]) for p in d.entry_points]
    only(monkeypatch, tuple(found))


def distribution(site: Path, name: str, entry: str, *requirements: str) -> None:
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    (folder / "entry_points.txt").write_text(f"[{discovery.ENTRY_POINTS}]\n{entry}\n")
