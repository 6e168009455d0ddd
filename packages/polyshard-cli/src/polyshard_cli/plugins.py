"""``polyshard plugins``: what is installed, and what is wrong with it."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from inspect import getattr_static
from pathlib import Path
from typing import Annotated

import typer

from polyshard.__about__ import __version__
from polyshard.errors import PluginError
from polyshard.installed import (
    HOOK_API,
    Contract,
    Installed,
    circle_of,
    contract_of,
    hook_arguments,
    installed_plugins,
    problems_of,
    unmet,
)
from polyshard_cli import scaffold
from polyshard_cli.output import told_in_one_message


@dataclass(frozen=True)
class Report:
    """One installed plugin as ``list`` and ``doctor`` show it."""

    name: str
    distribution: str
    version: str
    hook_api: str
    hooks: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Loaded:
    """An installed plugin and what became of importing it."""

    installed: Installed
    plugin: object | None
    contract: Contract | None
    problem: str

    @classmethod
    def of(cls, installed: Installed) -> Loaded:
        """Import it; a failure is kept, not raised."""
        try:
            plugin = installed.load()
            return cls(installed, plugin, contract_of(plugin), "")
        except PluginError as error:
            return cls(installed, None, None, str(error))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return cls(installed, None, None, _fault("declaring its contract", error))


def _fault(doing: str, error: BaseException) -> str:
    return f"{doing} raised {type(error).__name__}: {error}"


def examine(loaded: Loaded, everyone: Sequence[Loaded]) -> Report:
    """Collect everything wrong with a plugin among ``everyone`` that is installed."""
    installed, plugin, contract = loaded.installed, loaded.plugin, loaded.contract
    owners = [
        one.installed.distribution for one in everyone if one.installed.name == installed.name
    ]
    problems = []
    if len(owners) > 1:
        problems.append(
            f"several distributions provide a plugin named '{installed.name}': {', '.join(owners)}"
        )
    if contract is None:
        problems.append(loaded.problem)
        return Report(installed.name, installed.distribution, "", "", (), tuple(problems))
    problems.extend(_problems(plugin))
    if contract.name != installed.name:
        problems.append(
            f"its entry point is named '{installed.name}' and its contract '{contract.name}'; use "
            "one name, so that before=, after= and requires= mean the same"
        )
    contracts = {one.contract.name: one.contract for one in everyone if one.contract}
    problems.extend(_relation_problems(contract, list(contracts.values())))
    hooks = tuple(h for h in hook_arguments() if callable(getattr_static(plugin, h, None)))
    api = ".".join(map(str, contract.hook_api))
    version = contract.version
    return Report(installed.name, installed.distribution, version, api, hooks, tuple(problems))


def _problems(plugin: object) -> list[str]:
    """Those of the plugin itself, whose attributes are code that may do anything."""
    try:
        return problems_of(plugin)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return [_fault("looking for its hooks", error)]


def _relation_problems(contract: Contract, everyone: Sequence[Contract]) -> Iterator[str]:
    """What does not fit among all plugins that could be loaded."""
    for need in unmet(contract, everyone, "that is installed"):
        yield f"it {need}"
    circle = circle_of(everyone)
    if contract.name in circle:
        yield (
            f"it cannot be ordered: {' before '.join(circle)}; remove one of these before= or "
            "after= declarations"
        )
    known = sorted({word for other in everyone for word in other.answers_to()})
    for relation in ("before", "after", "conflicts_with"):
        for word in sorted(getattr(contract, relation).difference(known)):
            # Others may be installed elsewhere; only what looks like a slip is worth a word.
            for close in difflib.get_close_matches(word, known, n=1, cutoff=0.8):
                yield f"{relation} names '{word}', which is not installed; did you mean '{close}'?"


def reports() -> list[Report]:
    """Every installed plugin."""
    everyone = [Loaded.of(installed) for installed in installed_plugins()]
    return [examine(loaded, everyone) for loaded in everyone]


app = typer.Typer(help="Installed plugins.", no_args_is_help=True)


@app.command("list")
def show(*, as_json: bool = typer.Option(False, "--json", help="Print one JSON list.")) -> None:
    """List installed plugins. Installing a plugin activates nothing."""
    found = reports()
    if as_json:
        typer.echo(json.dumps([asdict(r) for r in found], indent=2))
        return
    if not found:
        typer.echo("no plugins are installed (entry points 'polyshard.plugins')")
    for report in found:
        state = "has problems, see doctor" if report.problems else ", ".join(report.hooks)
        typer.echo(f"{report.name}  {report.distribution}  {state}")


@app.command("doctor")
def doctor() -> None:
    """Check every installed plugin; exit with 1 if anything is wrong."""
    found = reports()
    for report in found:
        for problem in report.problems:
            typer.echo(f"✘ {report.name} ({report.distribution}): {problem}")
        if not report.problems:
            typer.echo(f"✔ {report.name} ({report.distribution})")
    api = ".".join(map(str, HOOK_API))
    typer.echo(f"polyshard {__version__}, hook API {api}, torch {_torch_version()}")
    if any(report.problems for report in found):
        raise typer.Exit(1)


@app.command()
def new(
    name: Annotated[
        str | None, typer.Argument(help="Name that users pass to plugins=[...], in snake case.")
    ] = None,
    *,
    seam: Annotated[
        str | None, typer.Option(help=f"Seam to start with: {', '.join(scaffold.seams())}.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder to write. Default: polyshard-NAME here.")
    ] = None,
    author: Annotated[str | None, typer.Option(help="Copyright holder.")] = None,
) -> None:
    """Create a plugin: a distribution with one seam, a README and tests.

    Asks for the name and the seam if they are not given. Exit code 2: nothing was written.
    """
    with told_in_one_message(scaffold.ScaffoldError):
        plugin = scaffold.checked_plugin(name or typer.prompt("Name of the plugin, in snake case"))
        chosen = scaffold.checked_seam(seam or _asked_seam())
        target = scaffold.checked_target(folder or Path(scaffold.distribution_of(plugin)))
        files = scaffold.Scaffold(plugin, chosen, target, author).render()
    typer.echo(f"written: {target}, {len(files)} files; users pass plugins=[{plugin!r}]")
    typer.echo(f'next: cd {target} && pip install -e ".[test]" && pytest')


def _asked_seam() -> str:
    for seam, text in scaffold.seams().items():
        typer.echo(f"  {seam}: a plugin that {text}")
    answer: str = typer.prompt("Seam to begin with", default=scaffold.DEFAULT_SEAM)
    return answer


def _torch_version() -> str:
    return importlib.metadata.version("torch")
