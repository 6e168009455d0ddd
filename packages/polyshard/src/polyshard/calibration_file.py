"""The file a calibration is kept in: JSON, readable by a person, checked when read."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from polyshard.break_even import BreakEven, Timing
from polyshard.errors import SettingError

FORMAT = 1


def write(break_evens: tuple[BreakEven, ...], path: Path) -> None:
    """Write to a file beside ``path`` first, so that a full disk leaves the old one."""
    content = {
        "format": FORMAT,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {platform.system()}",
        "break_evens": [asdict(b) for b in break_evens],
    }
    beside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        beside.write_text(json.dumps(content, indent=2) + "\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read(path: Path) -> tuple[BreakEven, ...]:
    """What :func:`write` wrote."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SettingError(
            f"cannot read a calibration from '{path}': {error}. Write one with "
            "Calibration.measure().save(path)."
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise SettingError(
            f"'{path}' is no calibration of format {FORMAT} (it says {found!r}). Measure again "
            "with Calibration.measure().save(path)."
        )
    try:
        return tuple(_break_even(b) for b in content["break_evens"])
    except (KeyError, TypeError, ValueError) as error:
        raise SettingError(
            f"the calibration in '{path}' is damaged: {type(error).__name__}: {error}. Measure "
            "again with Calibration.measure().save(path)."
        ) from error


def _break_even(plain: Mapping[str, Any]) -> BreakEven:
    staging_bytes = plain["staging_bytes"]
    if not isinstance(staging_bytes, int) or staging_bytes < 0:
        raise ValueError(f"staging_bytes is {staging_bytes!r}, not a number of bytes")
    timings = tuple(Timing(**timing) for timing in plain["timings"])
    return BreakEven(
        str(plain["transport"]),
        int(plain["world_size"]),
        staging_bytes,
        bool(plain["coalesces"]),
        timings,
    )
