"""A failing case as a program to paste into a file at the root of the repository."""

from __future__ import annotations

from dataclasses import fields

from fuzzing.case import NAMES, Case, Tree

TEMPLATE = '''\
"""{title}"""

import sys

sys.path.insert(0, "integration_tests")
from fuzzing.case import {names}
from fuzzing.session import Session

CASE = {case}

if __name__ == "__main__":
    session = Session()
    verdict = session.check(CASE, skip_known=False)
    session.close()
    sys.exit(f"{{verdict.kind}}: {{verdict.text}}" if verdict.failed else verdict.kind)
'''


def program(case: Case, title: str) -> str:
    """Run it with ``python FILE``; it starts its ranks itself."""
    text = pretty(case)
    names = sorted(name for name in NAMES if f"{name}(" in text)
    line = " ".join(title.split())[:90].replace("\\", "/").replace('"', "'")
    return TEMPLATE.format(title=line, names=", ".join(names), case=text)


def pretty(value: object, indent: int = 0) -> str:
    """The ``repr``, one module and one action a line."""
    flat = repr(value)
    if len(flat) + indent <= 92 or not isinstance(value, Case | Tree | tuple):
        return flat
    pad = " " * (indent + 4)
    if isinstance(value, tuple):
        lines = [f"{pad}{pretty(item, indent + 4)},\n" for item in value]
        return "(\n" + "".join(lines) + " " * indent + ")"
    lines = []
    for field in fields(value):
        item = getattr(value, field.name)
        if item != field.default:
            lines.append(f"{pad}{field.name}={pretty(item, indent + 4)},\n")
    return f"{type(value).__name__}(\n" + "".join(lines) + " " * indent + ")"
