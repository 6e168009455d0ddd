"""What a plugin implements, and what is wrong with it, or with what it gives.

Found where it is given, all at once, not where it is used.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from polyshard.errors import PluginError
from polyshard.plugins import hookspecs
from polyshard.plugins.contract import ATTRIBUTE, HOOK_API, PROJECT, Contract, contract_of

T = TypeVar("T")
Implementation = tuple[Callable[..., Any], tuple[str, ...]]
"""A function for a hook, and the arguments that it takes."""

_IMPLEMENTATION = f"{PROJECT}_impl"
_PREFIX = f"{PROJECT}_"
_UNDOING = ("pre_flatten_transform", "post_unflatten_transform")


@functools.cache
def hook_arguments() -> Mapping[str, tuple[str, ...]]:
    """Every hook and its arguments, in the order of the specification."""
    specs = {n: f for n, f in vars(hookspecs).items() if hasattr(f, f"{PROJECT}_spec")}
    return MappingProxyType({n: tuple(inspect.signature(f).parameters) for n, f in specs.items()})


def _candidates(plugin: object) -> Iterator[tuple[str, Any]]:
    """What of a plugin is, or looks like, a hook implementation."""
    hooks = hook_arguments()
    for name in dir(plugin):
        if name.startswith("__") or name == ATTRIBUTE:
            continue
        written = found = inspect.getattr_static(plugin, name, None)
        if not isinstance(written, property):  # whose value may be costly
            found = getattr(plugin, name, None)
        if not inspect.isroutine(found):
            if name in hooks and found is not None:  # None turns an inherited hook off
                yield name, found
        elif _is_marked(found) or _is_marked(written) or name in hooks or name.startswith(_PREFIX):
            yield name, found


def _is_marked(found: object) -> bool:
    return hasattr(found, _IMPLEMENTATION)


def problems_of(plugin: object) -> list[str]:
    """Everything wrong with ``plugin`` as a plugin; empty when all is well."""
    try:
        return examined(plugin, contract_of(plugin))[1]
    except PluginError as error:
        return [str(error)]


def examined(plugin: object, contract: Contract) -> tuple[dict[str, Implementation], list[str]]:
    """What ``plugin`` implements, by hook, and everything wrong with it."""
    if isinstance(plugin, type):
        return {}, [f"it is a class; pass an instance, {plugin.__name__}(...)"]
    problems: list[str] = []
    if not isinstance(plugin, ModuleType) and type(plugin).__eq__ is not object.__eq__:
        problems.append(
            "it overrides __eq__, and plugins are compared by identity; use "
            "@dataclass(frozen=True, eq=False)"
        )
    written_for = contract.hook_api
    if written_for[0] != HOOK_API[0] or written_for > HOOK_API:
        wanted, here = (".".join(map(str, version)) for version in (written_for, HOOK_API))
        problems.append(f"it was written for hook API {wanted}, this polyshard has {here}")
    found = list(_candidates(plugin))
    if not found:
        problems.append("it implements no hook; mark its functions with @polyshard.hookimpl")
    by_hook: dict[str, dict[str, Implementation]] = defaultdict(dict)
    for name, function in found:
        options = getattr(function, _IMPLEMENTATION, None)
        problems.extend(_problems_of_hook(plugin, name, function, options))
        if options is not None:
            taken = tuple(inspect.signature(function).parameters)
            by_hook[options.get("specname") or name][name] = function, taken
    problems.extend(_problems_together(by_hook))
    return {hook: next(iter(same.values())) for hook, same in by_hook.items()}, problems


def _problems_together(by_hook: Mapping[str, Collection[str]]) -> Iterator[str]:
    """What is wrong with the implementations of one plugin, by hook, taken together."""
    for hook, names in by_hook.items():
        if len(names) > 1:
            shown = " and ".join(f"'{name}'" for name in names)
            yield f"{shown} all implement '{hook}'; a plugin has one answer, so keep one"
    for one, other in (_UNDOING, _UNDOING[::-1]):
        if one in by_hook and other not in by_hook:
            yield f"it implements '{one}' without '{other}'; one undoes the other, so add it"


def _problems_of_hook(
    plugin: object, name: str, function: Any, options: Mapping[str, Any] | None
) -> Iterator[str]:
    hooks = hook_arguments()
    if not inspect.isroutine(function):
        kind = type(function).__name__
        yield f"'{name}' is a {kind} and not a function, so it would never be called"
        return
    if options is None:
        mistake = "is not marked with @polyshard.hookimpl, so it would never be called"
        if _is_marked(inspect.getattr_static(plugin, name, None)):
            mistake = (
                "hides its mark, so it would never be called: write @staticmethod and @classmethod "
                "above @polyshard.hookimpl, which marks the function itself"
            )
        yield f"'{name}' {mistake}"
        return
    hook = options.get("specname") or name
    if hook not in hooks:
        if not options.get("optionalhook"):
            yield f"no hook is named '{hook}'{_hint(hook, hooks, 'hooks:')}"
        return
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        yield f"'{name}' is a coroutine or generator; return the answer from a plain function"
    for option in ("hookwrapper", "wrapper", "tryfirst", "trylast"):
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
        hint = _hint(parameter.name, known, "it may take")
        yield f"'{name}' takes '{parameter.name}', which the hook does not have{hint}"
    elif parameter.default is not inspect.Parameter.empty:
        yield f"'{name}' gives '{parameter.name}' a default, which would hide the real value"


def _hint(word: str, known: Iterable[str], otherwise: str) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; {otherwise} {', '.join(known)}"


def misfit(value: object, seam: type) -> str | None:
    """What is wrong with ``value`` as a ``seam``, to be read after "returned"; else ``None``."""
    if isinstance(value, type):
        return f"the class {value.__name__}; return an instance"
    if not isinstance(value, seam):
        home = "polyshard.transport" if "transport" in seam.__module__ else "polyshard"
        return (
            f"a {type(value).__name__}, which is no {seam.__name__}; inherit from "
            f"{home}.{seam.__name__}"
        )
    declared = [name for base in seam.__mro__ for name in inspect.get_annotations(base)]
    missing = sorted(name for name in declared if not hasattr(value, name))
    lacks = f"a {type(value).__name__}, which lacks {', '.join(missing)} of {seam.__name__}"
    return lacks if missing else None


def fitting(value: T, seam: type, factory: Any, method: str) -> T:
    """``value``, which ``factory.method(...)`` returned, if it fits; the factory has a name."""
    if value is not None and (problem := misfit(value, seam)):
        call = f"{type(factory).__name__}.{method}"
        raise PluginError(f"'{factory.name}': {call} returned {problem}")
    return value


def wordless(answer: object, part: object, method: str) -> None:
    """Refuse an ``answer`` of a method that writes: what was sent is garbage."""
    if answer is not None:
        raise PluginError(
            f"{type(part).__name__}.{method} returned a {type(answer).__name__}, which would be "
            "dropped; write into the tensors it is given, and return nothing."
        )
