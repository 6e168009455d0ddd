"""``polyshard doctor``: whether this machine can train, and what to fix if it cannot."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyshard_cli.plugins import reports

if TYPE_CHECKING:
    from polyshard_cli.checks import Finding

Disk = Annotated[
    Path | None,
    typer.Option(help="Folder for checkpoints or offloaded state. Default: the temporary one."),
]


def doctor(disk: Disk = None, *, quick: bool = typer.Option(False, help="Start no ranks.")) -> None:
    """Check torch, network, limits, disk, plugins and two ranks; exit with 1 if a check fails."""
    from polyshard_cli.checks import State

    found = []
    for finding in _findings(disk or Path(tempfile.gettempdir()), quick=quick):
        typer.echo(f"{finding.state.value} {finding.what}: {finding.text}")
        found.append(finding)
    problems = [finding for finding in found if finding.state is State.PROBLEM]
    if problems:
        typer.echo(f"{len(problems)} to fix: {', '.join(finding.what for finding in problems)}")
        raise typer.Exit(1)


def _findings(disk: Path, *, quick: bool) -> Iterator[Finding]:
    from polyshard_cli import checks  # here: other verbs need not wait for torch to be imported
    from polyshard_cli.self_test import self_test

    yield from checks.torch_build()
    yield from checks.backends()
    yield from checks.interfaces()
    yield from checks.limits()
    yield from checks.shared_memory()
    yield from checks.disk(disk)
    yield from _plugins()
    if not quick:
        yield from self_test()


def _plugins() -> Iterator[Finding]:
    from polyshard_cli.checks import Finding, State

    found = reports()
    for report in found:
        what = f"plugin {report.name} ({report.distribution})"
        for problem in report.problems:
            yield Finding(what, State.PROBLEM, problem)
        if not report.problems:
            yield Finding(what, State.FINE, report.version)
    if not found:
        yield Finding("plugins", State.FINE, "none is installed")
