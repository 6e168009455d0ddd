"""Code that is written anew."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["call_text"]

_LONG = 72
"""Characters of a call from which on each argument has a line."""


def call_text(function: str, arguments: Sequence[str], indent: str = "") -> str:
    """``function(a, b)``, on several lines if it is long; ``indent`` is that of its own line."""
    short = f"{function}({', '.join(arguments)})"
    if len(indent) + len(short) <= _LONG:
        return short
    lines = "".join(f"{indent}    {argument},\n" for argument in arguments)
    return f"{function}(\n{lines}{indent})"
