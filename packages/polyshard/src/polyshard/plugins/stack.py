"""The plugins of one ``fully_shard`` call: resolved, checked, ordered, and asked while it plans.

pluggy finds the implementations of hooks. They are called one by one instead of through
``pm.hook``, so that every answer and every exception has a name on it; a step asks none.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NoReturn, ParamSpec, TypeVar

import pluggy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from polyshard.__about__ import __version__
from polyshard.errors import ConflictError, PluginError
from polyshard.plugins import hookspecs
from polyshard.plugins.contract import PROJECT, Contract, contract_of, settings_of
from polyshard.plugins.contributions import (
    RANKS_MAY_DIFFER,
    Answer,
    Contributions,
    PluginLines,
    contributions_of,
)
from polyshard.plugins.discovery import load_plugin
from polyshard.plugins.relations import check_relations, order
from polyshard.plugins.seams import GroupInfo, ParamInfo
from polyshard.plugins.transforms import Layer, TransformStack, name_of
from polyshard.plugins.validation import hook_arguments, problems_of

ENGINE = "engine"
"""What errors and plans call the engine where its own part takes a role."""
TRACE = "POLYSHARD_TRACE"
"""Environment variable: set to 1 to have every hook call of stacks made then shown on stderr."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """A plugin of a stack with what it declares."""

    plugin: object
    contract: Contract
    settings: str

    @property
    def label(self) -> str:
        """Name and version, as errors call it."""
        return f"'{self.contract.name}' ({self.contract.version})"

    @property
    def line(self) -> str:
        """All of it in a plan."""
        shown = f" ({self.settings})" if self.settings else ""
        return f"{self.contract.name} {self.contract.version}{shown}"

    @property
    def origin(self) -> str:
        """Where the plugin was defined."""
        plugin = self.plugin
        if isinstance(plugin, ModuleType):
            return plugin.__name__
        return f"{type(plugin).__module__}.{type(plugin).__qualname__}"

    @classmethod
    def of(cls, plugin: object) -> Member:
        """Read the contract and the settings of ``plugin``."""
        return cls(plugin, contract_of(plugin), settings_of(plugin))


@dataclass(frozen=True)
class Implementation:
    """One plugin's function for one hook: all that outlives pluggy's manager."""

    member: Member
    hook: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    trace: bool

    def __call__(self, given: Mapping[str, Any]) -> Any:
        """The answer to what it takes of ``given``; an exception gets the names of both."""
        begin = time.perf_counter() if self.trace else 0.0
        try:
            return self.function(*(given[name] for name in self.arguments))
        except Exception as error:
            error.add_note(f"raised by plugin {self.member.label} in {self.hook}")
            raise
        finally:
            if self.trace:
                seconds = time.perf_counter() - begin
                sys.stderr.write(f"polyshard: {self.hook} {self.member.label} {seconds:.6f} s\n")


class _PluginManager(pluggy.PluginManager):
    """pluggy's manager without its search of names that no hook has, which every object has."""

    @override
    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """As pluggy; nothing for what ``validation`` does not look at either."""
        return None if name.startswith("__") else super().parse_hookimpl_opts(plugin, name)


def _implementations(members: Sequence[Member]) -> Mapping[str, Sequence[Implementation]]:
    """The functions of ``members`` by hook, in their order."""
    if not members:
        return dict.fromkeys(hook_arguments(), ())  # pluggy would read all specifications first
    manager = _PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    for member in members:
        manager.register(member.plugin, name=member.contract.name)
    manager.check_pending()
    trace = os.environ.get(TRACE) == "1"
    return {
        hook: [
            Implementation(member, hook, one.function, tuple(one.argnames), trace)
            for member in members
            for one in getattr(manager.hook, hook).get_hookimpls()
            if one.plugin is member.plugin
        ]
        for hook in hook_arguments()
    }


class Teardown:
    """What plugins undo of a group: when they are told to, or when nobody holds the group any more.

    An object that the group owns instead of a finalizer: those are held by the interpreter with
    all they need, so that a plugin which knows its model would keep that alive.
    """

    def __init__(self, implementations: Sequence[Implementation], group: GroupInfo) -> None:
        """``implementations`` are in plugin order."""
        self.is_done = False
        self._implementations = implementations
        self._group = group

    def run(self) -> None:
        """Call each plugin, the last one first; a failure keeps none of the others.

        Raises:
            Exception: the first one raised, with notes of the others.
        """
        if self.is_done:
            return
        self.is_done = True
        errors: list[Exception] = []
        for implementation in reversed(self._implementations):
            try:
                implementation({"group": self._group})
            except Exception as error:
                error.add_note(f"while letting go of group '{self._group.identity}'")
                errors.append(error)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"and then: {other!r} ({'; '.join(other.__notes__)})")
            raise errors[0]

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """The group is gone. A process that ends gives everything back by itself."""
        if not is_finalizing():
            self.run()


class PluginStack:
    """Plugins in order. Immutable; the same plugin objects may serve many stacks."""

    def __init__(self, members: Sequence[Member]) -> None:
        """``members`` are in plugin order, and have been checked."""
        self._members = tuple(members)
        self._implementations = _implementations(members)
        local = [m for m in members if self._hooks_of(m) <= RANKS_MAY_DIFFER]
        self._lines = PluginLines(
            compared=tuple(m.line for m in members if m not in local),
            local=tuple(m.line for m in local),
        )
        undo = {id(i.member): i for i in self._implementations["post_unflatten_transform"]}
        self.transforms = TransformStack(
            [
                Layer(i.member.contract.name, i.member.label, i, undo[id(i.member)])
                for i in self._implementations["pre_flatten_transform"]
            ]
        )

    def _hooks_of(self, member: Member) -> set[str]:
        every = self._implementations.items()
        return {hook for hook, found in every if any(i.member is member for i in found)}

    @property
    def plugins(self) -> tuple[object, ...]:
        """The plugins themselves, in order."""
        return tuple(member.plugin for member in self._members)

    def lines(self) -> tuple[str, ...]:
        """One line per plugin."""
        return tuple(m.line for m in self._members)

    def joined(self, plugin: object) -> PluginStack:
        """The same plugins and one more.

        Raises:
            PluginError: as :func:`build_stack`.
        """
        return build_stack([*self.plugins, plugin])

    def ask(self, hook: str, **given: Any) -> list[Answer[Any]]:
        """What plugins answer to ``hook``, in plugin order; ``None`` is no answer.

        An exception gets a note that names the plugin and the hook.
        """
        assert given.keys() == set(hook_arguments()[hook]), hook
        values = [(i.member, i(given)) for i in self._implementations[hook]]
        return [Answer(m.contract.name, m.label, v) for m, v in values if v is not None]

    def claimed(self, spec: Callable[P, T | None], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What the only plugin that has one answers to an exclusive hook about one parameter.

        ``spec`` is the hook in :mod:`~polyshard.plugins.hookspecs`; ``None`` if no plugin answers.

        Raises:
            ConflictError: naming the plugins, where several do.
        """
        given = inspect.signature(spec).bind(*args, **kwargs).arguments
        claims = self.ask(spec.__name__, **given)
        if len(claims) > 1:
            plugins = " and ".join(claim.label for claim in claims)
            raise ConflictError(
                f"plugins {plugins} both answer {spec.__name__} for {name_of(given['param'])}. "
                "Pass only one of them, or narrow one so that it returns None for this parameter."
            )
        return claims[0].value if claims else None

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Let every plugin change the module before its parameters are collected.

        Raises:
            PluginError: for a plugin that returns another module, which would be lost.
        """
        for answer in self.ask("polyshard_prepare_model", module=module, mesh=mesh):
            if answer.value is not module:
                raise PluginError(
                    f"plugin {answer.label} returned a {type(answer.value).__name__} from "
                    "polyshard_prepare_model, which would be dropped; change the module in place."
                )

    def facts(self, tensor: Tensor, param: ParamInfo) -> tuple[str, ...]:
        """What plugins say of a parameter.

        Raises:
            PluginError: for an answer that is not a line of text.
        """
        answers = self.ask("polyshard_parameter_facts", tensor=tensor, param=param)
        for answer in answers:
            if not isinstance(answer.value, str) or "\n" in answer.value:
                raise PluginError(
                    f"plugin {answer.label} returned {answer.value!r} from "
                    f"polyshard_parameter_facts for {name_of(param)}; return one line of text."
                )
        return tuple(answer.value for answer in answers)

    def contributions(self, group: GroupInfo) -> Contributions:
        """Who does what for ``group``: everything claimed, checked, then frozen.

        Raises:
            ConflictError: listing every role that two plugins claim.
            PluginError: listing every answer that is not what its hook asks for.
        """
        ask = partial(self.ask, group=group)
        return contributions_of(ask, f"'{ENGINE}' ({__version__})", group, self._lines)

    def teardown(self, group: GroupInfo) -> Teardown:
        """What plugins undo when ``group`` goes."""
        return Teardown(self._implementations["polyshard_teardown"], group)


def build_stack(plugins: Sequence[object | str]) -> PluginStack:
    """Resolve names, check contracts, order, and register.

    Args:
        plugins: plugin objects, or names of installed plugins.

    Raises:
        PluginError: for everything that is wrong with any of the plugins, at once.
        ConflictError: when they exclude each other, or cannot be ordered, and all else is well.
    """
    if isinstance(plugins, str):
        raise PluginError(f"plugins= takes a list, got the string '{plugins}'; pass ['{plugins}'].")
    refusals: list[PluginError] = []
    members: list[Member] = []
    for given in plugins:
        try:
            members.append(Member.of(load_plugin(given) if isinstance(given, str) else given))
        except PluginError as error:
            refusals.append(error)
    contracts = [m.contract for m in members]
    ordered: list[str] = []
    if not refusals:  # else what seems to be missing may be what could not be loaded
        for check in (partial(_check_names, members), partial(check_relations, contracts)):
            _keep(refusals, check)
    if not refusals:
        _keep(refusals, lambda: ordered.extend(order(contracts)))
    objections = [
        f"plugin {m.label}: {problem}" for m in members for problem in problems_of(m.plugin)
    ]
    if refusals or objections:
        _refuse(refusals, objections)
    by_name = {m.contract.name: m for m in members}
    return PluginStack([by_name[name] for name in ordered])


def _check_names(members: Sequence[Member]) -> None:
    """Every plugin has a name of its own.

    Raises:
        PluginError: saying where each plugin of a name comes from.
    """
    problems = []
    by_name: dict[str, list[Member]] = {ENGINE: []}
    for member in members:
        by_name.setdefault(member.contract.name, []).append(member)
    for name, same in by_name.items():
        origins = " and ".join(f"{m.origin} ({m.contract.version})" for m in same)
        if name == ENGINE and same:
            problems.append(f"'{ENGINE}' is the name of the engine; rename {origins}.")
        elif len(same) > 1:
            problems.append(f"{len(same)} plugins are named '{name}': {origins}; pass one of them.")
    if problems:
        raise PluginError("\n".join(problems))


def _keep(refusals: list[PluginError], check: Callable[[], None]) -> None:
    try:
        check()
    except PluginError as error:
        refusals.append(error)


def _refuse(refusals: Sequence[PluginError], objections: Sequence[str]) -> NoReturn:
    """Raise everything that was found, in one error."""
    if len(refusals) == 1 and not objections:
        raise refusals[0]
    conflicts_only = not objections and all(isinstance(r, ConflictError) for r in refusals)
    kind = ConflictError if conflicts_only else PluginError
    cause = refusals[0] if refusals else None
    raise kind("\n".join([*map(str, refusals), *objections])) from cause
