"""The file a calibration is kept in: JSON, readable by a person, checked when read.

It may come from anywhere, so nothing in it is believed: every field has a type and a range, and
an error names the place in the file.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch

from polyshard.errors import SettingError
from polyshard.files import replace_file
from polyshard_calibration.threshold import BreakEven, Timing

FORMAT = 1
MAX_FILE_BYTES = 1 << 20
MAX_BYTES = (1 << 63) - 1
MAX_RANKS = (1 << 31) - 1


def write(break_evens: tuple[BreakEven, ...], path: Path) -> None:
    """Write all or nothing: a full disk leaves the old file."""
    content = {
        "format": FORMAT,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {platform.system()}",
        "break_evens": [asdict(b) for b in break_evens],
    }
    replace_file(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def read(path: Path) -> tuple[BreakEven, ...]:
    """What :func:`write` wrote.

    Raises:
        SettingError: naming the file and the field.
    """
    content = _parsed(path)
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT or isinstance(found, bool):
        raise SettingError(
            f"'{path}' is no calibration of format {FORMAT} (its format: {_short(found)}). Measure "
            "again with Calibration.measure().save(path)."
        )
    try:
        return tuple(_break_even(one) for one in _Node(content, "").items("break_evens"))
    except ValueError as error:
        raise SettingError(
            f"the calibration in '{path}' is damaged: {error}. Measure again with "
            "Calibration.measure().save(path)."
        ) from error


def _parsed(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
        return json.loads(text, parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(
            f"cannot read a calibration from '{path}': {error}. Write one with "
            "Calibration.measure().save(path)."
        ) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no JSON")


class _Node:
    """One JSON object and where it is; everything it gives out is checked."""

    def __init__(self, plain: object, where: str) -> None:
        if not isinstance(plain, dict):
            raise ValueError(f"{where} is {_short(plain)}, not an object")
        self._plain = plain
        self._where = where

    def _get(self, name: str) -> tuple[object, str]:
        where = f"{self._where}.{name}" if self._where else name
        if name not in self._plain:
            raise ValueError(f"{where} is missing")
        return self._plain[name], where

    def items(self, name: str) -> Iterator[_Node]:
        """The objects of a list."""
        value, where = self._get(name)
        if not isinstance(value, list):
            raise ValueError(f"{where} is {_short(value)}, not a list")
        for index, one in enumerate(value):
            yield _Node(one, f"{where}[{index}]")

    def whole(self, name: str, least: int, most: int) -> int:
        value, where = self._get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"{where} is {_short(value)}, not an integer from {least} to {most}")
        return value

    def seconds(self, name: str) -> float:
        value, where = self._get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 <= value <= MAX_BYTES and math.isfinite(value)):  # type: ignore[operator,arg-type]
            raise ValueError(f"{where} is {_short(value)}, not a number of seconds")
        return float(value)  # type: ignore[arg-type]

    def optional_seconds(self, name: str) -> float | None:
        return None if self._plain.get(name) is None else self.seconds(name)

    def text(self, name: str) -> str:
        value, where = self._get(name)
        if not isinstance(value, str):
            raise ValueError(f"{where} is {_short(value)}, not a text")
        return value

    def truth(self, name: str) -> bool:
        value, where = self._get(name)
        if not isinstance(value, bool):
            raise ValueError(f"{where} is {_short(value)}, not true or false")
        return value


def _break_even(node: _Node) -> BreakEven:
    return BreakEven(
        node.text("transport"),
        node.whole("world_size", 1, MAX_RANKS),
        node.whole("staging_bytes", 0, MAX_BYTES),
        node.truth("coalesces"),
        tuple(_timing(one) for one in node.items("timings")),
    )


def _timing(node: _Node) -> Timing:
    return Timing(
        node.whole("chunk_bytes", 1, MAX_BYTES),
        node.seconds("packed"),
        node.seconds("direct"),
        node.optional_seconds("coalesced"),
    )


def _short(value: object) -> str:
    """``value`` in a message: a file may hold anything of any size."""
    if isinstance(value, int) and abs(value) > MAX_BYTES:
        return "an integer of more than 63 bits"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
