"""What may be refused: every pattern is an error that the table of what is supported lists."""

from __future__ import annotations

import re

EXPECTED: tuple[str, ...] = ()


def is_expected(text: str) -> bool:
    """Whether a refusal with this message is documented."""
    return any(re.search(pattern, text) for pattern in EXPECTED)
