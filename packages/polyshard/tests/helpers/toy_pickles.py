"""What a checkpoint may hold that was written to harm: calls made when it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Call:
    """Pickled, it calls a function when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.what = (function, arguments)

    def __reduce__(self) -> Any:
        return self.what


def make(path: Path) -> None:
    path.touch()
