"""What came out, frozen; its fields are those of ``--json``."""

from __future__ import annotations

import difflib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from polyshard_cli.__about__ import __version__
from polyshard_cli.migrate.editing.finding import Finding, Kind

__all__ = ["SCHEMA", "Document", "MigratedFile"]

SCHEMA = 1
"""Raised when a field goes or means something else; new fields leave it."""


@dataclass(frozen=True)
class MigratedFile:
    """One script: ``before`` and ``after`` are its bytes, ``findings`` in order of lines."""

    path: Path
    before: bytes
    after: bytes
    encoding: str
    findings: tuple[Finding, ...]

    @property
    def is_changed(self) -> bool:
        """Whether there is something to write."""
        return self.before != self.after

    def lines(self, text: bytes) -> list[str]:
        """Those of ``text``, with their ends, as Python counts them: form feeds end none."""
        return list(io.StringIO(text.decode(self.encoding), newline=""))

    @property
    def diff(self) -> str:
        """From before to after, unified; empty if nothing changes."""
        if not self.is_changed:  # perhaps of an encoding that was never needed
            return ""
        old, new = map(self.lines, (self.before, self.after))
        name = str(self.path).lstrip("/")  # as git shows it
        lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in lines
        )


@dataclass(frozen=True)
class Document:
    """Everything about one run over ``files``; ``is_written`` once they were."""

    files: tuple[MigratedFile, ...]
    is_written: bool = False

    @property
    def left(self) -> int:
        """How many findings the user has to look at."""
        return sum(finding.kind.is_left for file in self.files for finding in file.findings)

    def to_json(self) -> str:
        """The schema of ``docs/reference/migration-json.md``."""
        return json.dumps(
            {
                "schema": SCHEMA,
                "polyshard_cli": __version__,
                "written": self.is_written,
                "left": self.left,
                "files": [_file(file) for file in self.files],
            },
            indent=2,
        )


def _file(file: MigratedFile) -> dict[str, object]:
    counts = {kind.value: sum(f.kind is kind for f in file.findings) for kind in Kind}
    return {
        "path": str(file.path),
        "changed": file.is_changed,
        "diff": file.diff,
        "counts": counts,
        "findings": [asdict(finding) for finding in file.findings],
    }
