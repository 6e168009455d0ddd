"""The document for people: the diff, then the findings, line by line."""

from __future__ import annotations

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from polyshard_cli.migrate.editing.finding import Finding, Kind
from polyshard_cli.migrate.report.document import Document, MigratedFile

__all__ = ["WIDTH", "show"]

WIDTH = 100
_TITLES = {
    Kind.DIFFERS: "What will differ",
    Kind.HAND: "To do by hand",
    Kind.REFUSED: "Refused",
}


def show(document: Document, console: Console) -> None:
    """Print all files about which there is something to say, and a last line for all."""
    told = [file for file in document.files if file.is_changed or file.findings]
    for file in told:
        _show_file(file, console)
    changed = sum(file.is_changed for file in document.files)
    verb = "changed" if document.is_written else "would change; --write changes them"
    console.print(_said(f"{changed} of {_files(len(document.files))} {verb}."))
    if document.left:
        console.print(_said(f"{document.left} to do by hand."))


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _show_file(file: MigratedFile, console: Console) -> None:
    if file.is_changed:
        if console.is_terminal:
            console.print(Syntax(file.diff, "diff", background_color="default"))
        else:
            console.out(file.diff, highlight=False, end="")
    for kind, title in _TITLES.items():
        findings = [finding for finding in file.findings if finding.kind is kind]
        if findings:
            console.print()
            console.print(Text(f"{title} ({file.path})", style="bold"))
            for finding in findings:
                console.print(_line(finding))
    console.print()


def _line(finding: Finding) -> Text:
    text = f"  line {finding.line}: {finding.term}: {finding.message}"
    if finding.instead:
        text += f" Instead: {finding.instead}."
    return _said(text.replace("..", ".") if text.endswith("..") else text)


def _said(text: str) -> Text:
    """Without markup, which a script's own names might look like."""
    return Text(text)
