"""How the plans of ranks differ, for a person."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

SHOWN_LINES = 20


def difference(texts: Mapping[tuple[int, ...], str]) -> str:
    """What to say about different ``texts``, by the ranks that hold them."""
    first, *others = sorted(texts)
    report = ["ranks planned different things; nothing was communicated yet."]
    for ranks in others:
        before, after = texts[first].splitlines(), texts[ranks].splitlines()
        diff = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]  # without file names
        changed = [line for line in diff if line[:1] in "+-"]
        report.append(f"rank {first[0]} (-) against ranks {list(ranks)} (+):")
        report.extend(changed[:SHOWN_LINES])
        if len(changed) > SHOWN_LINES:
            report.append(f"... and {len(changed) - SHOWN_LINES} more lines")
    report.append("Pass the same model, mesh, policies and plugins on every rank.")
    return "\n".join(report)
