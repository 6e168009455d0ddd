"""The formats there are, by name. A new one is a file beside this one and a line in its table."""

from __future__ import annotations

from polyshard.errors import SettingError
from polyshard_quantized.formats.base import BlockFormat
from polyshard_quantized.formats.float8 import Float8Block
from polyshard_quantized.formats.int4 import Int4Block
from polyshard_quantized.formats.int8 import Int8Block

FORMATS: tuple[type[BlockFormat], ...] = (Int8Block, Float8Block, Int4Block)


def format_names() -> tuple[str, ...]:
    """What :func:`format_named` knows, the default first."""
    return tuple(form.name for form in FORMATS)


def format_named(name: str) -> BlockFormat:
    """The format called ``name``, with blocks of the size it has by default.

    Raises:
        SettingError: listing the names there are.
    """
    found = next((form for form in FORMATS if form.name == name), None)
    if found is None:
        known = ", ".join(format_names())
        raise SettingError(f"there is no format {name!r}; choose one of {known}.")
    return found()
