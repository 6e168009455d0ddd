"""What is wrong with an object as a plugin: all that pluggy accepts in silence, found at once."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

from polyshard import hookspecs
from polyshard.contract import ATTRIBUTE, contract_of
from polyshard.errors import PluginError
from polyshard.markers import HOOK_API, PROJECT

_IMPLEMENTATION = f"{PROJECT}_impl"
_PREFIX = f"{PROJECT}_"
_ONION = ("pre_flatten_transform", "post_unflatten_transform")


@functools.cache
def hook_arguments() -> Mapping[str, tuple[str, ...]]:
    """Every hook and its arguments, in the order of the specification."""
    marked = vars(hookspecs).items()
    return MappingProxyType(
        {
            name: tuple(inspect.signature(spec).parameters)
            for name, spec in marked
            if hasattr(spec, f"{PROJECT}_spec")
        }
    )


def _candidates(plugin: object) -> Iterator[tuple[str, Any]]:
    """What of a plugin is, or looks like, a hook implementation."""
    hooks = hook_arguments()
    for name in dir(plugin):
        if name.startswith("__") or name == ATTRIBUTE:
            continue
        found = inspect.getattr_static(plugin, name, None)
        if not isinstance(found, property):  # whose value may be costly
            found = getattr(plugin, name, None)
        if not inspect.isroutine(found):
            if name in hooks and found is not None:  # None turns an inherited hook off
                yield name, found
        elif hasattr(found, _IMPLEMENTATION) or name in hooks or name.startswith(_PREFIX):
            yield name, found


def problems_of(plugin: object) -> list[str]:
    """Everything wrong with ``plugin`` as a plugin; empty when all is well."""
    if isinstance(plugin, type):
        return [f"it is a class; pass an instance, {plugin.__name__}(...)"]
    problems: list[str] = []
    if not isinstance(plugin, ModuleType) and type(plugin).__eq__ is not object.__eq__:
        problems.append(
            "it overrides __eq__, and plugins are told apart by identity; use "
            "@dataclass(frozen=True, eq=False)"
        )
    try:
        written_for = contract_of(plugin).hook_api
    except PluginError as error:
        return [*problems, str(error)]
    if written_for[0] != HOOK_API[0] or written_for > HOOK_API:
        problems.append(
            f"it was written for hook API {_dotted(written_for)}, this polyshard has "
            f"{_dotted(HOOK_API)}"
        )
    found = list(_candidates(plugin))
    if not found:
        problems.append("it implements no hook; mark its functions with @polyshard.hookimpl")
    for name, function in found:
        problems.extend(_problems_of_hook(name, function))
    problems.extend(_problems_together(found))
    return problems


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _problems_together(found: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """What is wrong with the implementations of one plugin taken together."""
    implemented: dict[str, list[str]] = defaultdict(list)
    for name, function in found:
        options = getattr(function, _IMPLEMENTATION, None)
        if options is not None:
            implemented[options.get("specname") or name].append(name)
    for hook, names in implemented.items():
        if len(names) > 1:
            shown = " and ".join(f"'{name}'" for name in names)
            yield f"{shown} all implement '{hook}'; a plugin has one answer, so keep one"
    for one, other in (_ONION, _ONION[::-1]):
        if one in implemented and other not in implemented:
            yield f"it implements '{one}' without '{other}'; one undoes the other, so add it"


def _problems_of_hook(name: str, function: Any) -> Iterator[str]:
    hooks = hook_arguments()
    if not inspect.isroutine(function):
        kind = type(function).__name__
        yield f"'{name}' is a {kind} and not a function, so it would never be called"
        return
    options = getattr(function, _IMPLEMENTATION, None)
    if options is None:
        yield f"'{name}' is not marked with @polyshard.hookimpl, so it would never be called"
        return
    hook = options.get("specname") or name
    if hook not in hooks:
        if not options.get("optionalhook"):
            close = difflib.get_close_matches(hook, hooks, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else f"; hooks: {', '.join(hooks)}"
            yield f"no hook is named '{hook}'{hint}"
        return
    if options.get("hookwrapper") or options.get("wrapper"):
        yield f"'{name}' is a hook wrapper; order is declared with before and after instead"
    elif inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        yield f"'{name}' is a coroutine or generator; return the answer from a plain function"
    for option in ("tryfirst", "trylast"):
        if options.get(option):
            yield f"'{name}' sets {option}; order is declared with before and after instead"
    for parameter in inspect.signature(function).parameters.values():
        yield from _problems_of_argument(name, parameter, hooks[hook])


def _problems_of_argument(
    name: str, parameter: inspect.Parameter, known: Sequence[str]
) -> Iterator[str]:
    if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        kind = parameter.kind.description
        yield f"'{name}' takes '{parameter.name}' {kind}; take it plainly by name"
    elif parameter.name not in known:
        close = difflib.get_close_matches(parameter.name, known, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else f"; it may take {', '.join(known)}"
        yield f"'{name}' takes '{parameter.name}', which the hook does not have{hint}"
    elif parameter.default is not inspect.Parameter.empty:
        yield f"'{name}' gives '{parameter.name}' a default, which would hide the real value"
