"""Objects by their names: ``package.module:attribute``."""

from __future__ import annotations

import pkgutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from polyshard_cli.plan.errors import PlanError, nearest


def imported(name: str, option: str) -> Any:
    """What ``package.module:attribute`` is; modules of the current directory are found, too.

    Errors name ``option``, by which the user asked for it.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise PlanError(f"{option} {name!r}: write package.module:attribute")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = import_module(module_name)
    except Exception as error:
        raise PlanError(
            f"{option} {name!r}: importing {module_name} failed: {type(error).__name__}: {error}."
            f"{_near(module_name, error)}"
        ) from error
    try:
        found: Any = module
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError:
        close = nearest(attribute, dir(module))
        hint = f"; did you mean {module_name}:{close}?" if close else ""
        raise PlanError(f"{option} {name!r}: {module_name} has no {attribute!r}{hint}") from None
    return found


def called(function: Any, said: str, *given: Any) -> Any:
    """What the user's ``function`` returns; an error begins with what the user ``said``."""
    try:
        return function(*given)
    except Exception as error:
        kind = type(error).__name__
        raise PlanError(f"{said}: calling it failed: {kind}: {error}") from error


def _near(module_name: str, error: Exception) -> str:
    """A module of nearly that name, where the module itself is what is missing."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if not missing or not f"{module_name}.".startswith(f"{missing}."):
        return ""
    parent, _, last = missing.rpartition(".")
    path = sys.modules[parent].__path__ if parent in sys.modules else None
    close = nearest(last, (found.name for found in pkgutil.iter_modules(path)))
    return f" Did you mean {f'{parent}.' if parent else ''}{close}?" if close else ""
