"""``polyshard plugins``: what is installed, and what is wrong with it."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import asdict, dataclass

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from polyshard.__about__ import __version__
from polyshard.contract import contract_of
from polyshard.discovery import Installed, installed_plugins
from polyshard.errors import PluginError
from polyshard.manager import hook_arguments, problems_of
from polyshard.markers import HOOK_API


@dataclass(frozen=True)
class Report:
    """One installed plugin as ``list`` and ``doctor`` show it."""

    name: str
    distribution: str
    version: str
    hook_api: str
    hooks: tuple[str, ...]
    problems: tuple[str, ...]


def examine(installed: Installed, names: list[str]) -> Report:
    """Load a plugin and collect everything wrong with it; ``names`` are those of all installed."""
    problems = []
    if names.count(installed.name) > 1:
        problems.append(f"several distributions provide a plugin named '{installed.name}'")
    problems.extend(_version_problems(installed))
    try:
        plugin = installed.load()
    except PluginError as error:
        return Report(installed.name, installed.distribution, "", "", (), (*problems, str(error)))
    contract = contract_of(plugin)
    problems.extend(problems_of(plugin))
    if contract.name != installed.name:
        problems.append(
            f"its entry point is named '{installed.name}' and its contract '{contract.name}'; use "
            "one name, so that before=, after= and requires= mean the same"
        )
    problems.extend(
        f"it requires '{need}', and no installed plugin has that name"
        for need in sorted(contract.requires - set(names) - contract.provides)
    )
    hooks = tuple(h for h in hook_arguments() if hasattr(type(plugin), h) or hasattr(plugin, h))
    api = ".".join(map(str, contract.hook_api))
    version = contract.version
    return Report(installed.name, installed.distribution, version, api, hooks, tuple(problems))


def _version_problems(installed: Installed) -> list[str]:
    """Bounds of the plugin's distribution on polyshard that this polyshard does not meet."""
    distribution = installed.entry_point.dist
    requirements = [Requirement(r) for r in (distribution.requires or [])] if distribution else []
    return [
        f"{installed.distribution} needs {requirement}, this is polyshard {__version__}"
        for requirement in requirements
        if canonicalize_name(requirement.name) == "polyshard"
        and not requirement.specifier.contains(__version__, prereleases=True)
    ]


def reports() -> list[Report]:
    """Every installed plugin."""
    found = installed_plugins()
    names = [i.name for i in found]
    return [examine(installed, names) for installed in found]


def app() -> typer.Typer:
    """The subcommands of ``polyshard plugins``."""
    commands = typer.Typer(help="Installed plugins.", no_args_is_help=True)

    @commands.command("list")
    def show(
        *, as_json: bool = typer.Option(False, "--json", help="For programs: one JSON list.")
    ) -> None:
        """List installed plugins. Being listed activates nothing."""
        found = reports()
        if as_json:
            typer.echo(json.dumps([asdict(r) for r in found], indent=2))
            return
        if not found:
            typer.echo("no plugins are installed (entry points 'polyshard.plugins')")
        for report in found:
            state = "has problems, see doctor" if report.problems else ", ".join(report.hooks)
            typer.echo(f"{report.name}  {report.distribution}  {state}")

    @commands.command("doctor")
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

    return commands


def _torch_version() -> str:
    return importlib.metadata.version("torch")
