"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from polyshard_cli.plan.errors import PlanError

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}
WRITTEN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?")


def parse_bytes(text: str, option: str) -> int:
    """Bytes that ``text`` says, such as ``70GiB`` (binary), ``80GB`` (decimal) or ``1000000``.

    Raises:
        PlanError: for anything else, and for nothing.
    """
    found = WRITTEN.fullmatch(text.strip())
    nbytes = round(float(found[1]) * UNITS[found[2] or ""]) if found else 0
    if nbytes < 1:
        raise PlanError(f"{option} {text}: write a size such as 70GiB, 512MiB or 80GB")
    return nbytes
