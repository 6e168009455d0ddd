"""The plugins of one ``fully_shard`` call: resolved, checked, ordered, and asked per group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from polyshard.plugins.claims import contributions_of
from polyshard.plugins.hooks import Hooks, ParameterHooks, Teardown
from polyshard.plugins.manager import Implementation, Manager, Member, tracing
from polyshard.plugins.ordering import check_relations, order
from polyshard.plugins.roles import Contributions, PluginLines
from polyshard.plugins.transforms import Onion, name_of
from polyshard.errors import ConflictError, PluginError
from polyshard.plugins.builtin import EnginePlugin
from polyshard.plugins.discovery import load_plugin
from polyshard.plugins.validation import problems_of
from polyshard.plugins.seams import GroupInfo, ParameterTransform, ParamInfo

ENGINE = EnginePlugin.name


@dataclass(frozen=True)
class PluginTransform(ParameterTransform):
    """One plugin's layer of the onion: its own functions, because steps run them on gradients."""

    member: Member
    flattening: Implementation
    unflattening: Implementation

    @property
    @override
    def name(self) -> str:
        return self.member.contract.name

    @override
    def flatten(self, tensor: Tensor, param: ParamInfo | None) -> tuple[Tensor, Any | None]:
        answer = self.flattening({"tensor": tensor, "param": param})
        if answer is None:
            return tensor, None
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Tensor)):
            raise PluginError(
                f"plugin {self.member.label} returned a {type(answer).__name__} from "
                f"pre_flatten_transform for {name_of(param)}; return a tensor and an extension."
            )
        flat, extension = answer
        return flat, extension

    @override
    def unflatten(self, tensor: Tensor, param_extension: Any, param: ParamInfo | None) -> Tensor:
        given = {"tensor": tensor, "param_extension": param_extension, "param": param}
        answer: Tensor | None = self.unflattening(given)
        if answer is None:
            raise PluginError(
                f"plugin {self.member.label} flattened {name_of(param)} but gave no answer in "
                "post_unflatten_transform; return the unflattened tensor."
            )
        return answer


class PluginStack:
    """Plugins in order. Immutable; the same plugin objects may serve many stacks."""

    def __init__(self, members: Sequence[Member]) -> None:
        """``members`` are in plugin order; the engine answers last."""
        self._members = tuple(members)
        self._hooks = Hooks(Manager(members, last=_engine(is_traced=tracing())), ENGINE)
        local = [m for m in members if self._hooks.is_local(m)]
        self._lines = PluginLines(
            compared=tuple(m.line for m in members if m not in local),
            local=tuple(m.line for m in local),
        )
        self._onion = Onion([PluginTransform(*layer) for layer in self._hooks.layers()])

    @property
    def plugins(self) -> tuple[object, ...]:
        """The plugins themselves, in order."""
        return tuple(member.plugin for member in self._members)

    def lines(self) -> tuple[str, ...]:
        """One line per plugin, engine excluded."""
        return tuple(m.line for m in self._members)

    def joined(self, plugin: object) -> PluginStack:
        """The same plugins and one more.

        Raises:
            PluginError: as :func:`build_stack`.
        """
        return build_stack([*(member.plugin for member in self._members), plugin])

    @property
    def onion(self) -> Onion:
        """The transforms of all plugins, in plugin order."""
        return self._onion

    @property
    def parameter_hooks(self) -> ParameterHooks:
        """The exclusive hooks of single parameters."""
        return self._hooks.parameter

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Let every plugin change the module before its parameters are collected.

        Raises:
            PluginError: for a plugin that returns another module, which would be lost.
        """
        for answer in self._hooks.prepare_model(module, mesh):
            if answer.value is not module:
                raise PluginError(
                    f"plugin {answer.member.label} returned a {type(answer.value).__name__} from "
                    "polyshard_prepare_model, which would be dropped; change the module in place."
                )

    def facts(self, tensor: Tensor, param: ParamInfo) -> tuple[str, ...]:
        """What plugins say of a parameter.

        Raises:
            PluginError: for an answer that is not a line of text.
        """
        answers = self._hooks.parameter_facts(tensor, param)
        for answer in answers:
            given: object = answer.value
            if not isinstance(given, str) or "\n" in given:
                raise PluginError(
                    f"plugin {answer.member.label} returned {given!r} from "
                    f"polyshard_parameter_facts for {name_of(param)}; return one line of text."
                )
        return tuple(answer.value for answer in answers)

    def contributions(self, group: GroupInfo) -> Contributions:
        """Who does what for ``group``: everything claimed, checked, then frozen.

        Raises:
            ConflictError: listing every role that two plugins claim.
            PluginError: listing every answer that is not what its hook asks for.
        """
        return contributions_of(self._hooks, _engine_member(), group, self._lines)

    def teardown(self, group: GroupInfo, name: object) -> Teardown:
        """What plugins undo when ``group`` goes, which is called ``str(name)`` then."""
        return self._hooks.teardown(group, name)


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
    members = _resolve(plugins, refusals)
    contracts = [m.contract for m in members]
    if not refusals:  # else what seems to be missing may be what could not be loaded
        _keep(refusals, lambda: _check_names(members))
        _keep(refusals, lambda: check_relations(contracts))
    ordered: list[str] = []
    if not refusals:
        _keep(refusals, lambda: ordered.extend(order(contracts)))
    objections = [
        f"plugin {m.label}: {problem}" for m in members for problem in problems_of(m.plugin)
    ]
    if refusals or objections:
        _refuse(refusals, objections)
    by_name = {m.contract.name: m for m in members}
    return PluginStack([by_name[name] for name in ordered])


@functools.cache
def _engine_member() -> Member:
    """The engine, as the plugin that answers where no other does."""
    return Member.of(EnginePlugin())


@functools.cache
def _engine(*, is_traced: bool) -> Manager:
    """The engine's own answers, the same for every stack and made once.

    ``is_traced`` is what they read when they are made.
    """
    del is_traced
    return Manager([_engine_member()])


def _resolve(plugins: Sequence[object | str], refusals: list[PluginError]) -> list[Member]:
    members: list[Member] = []
    for given in plugins:
        try:
            members.append(Member.of(load_plugin(given) if isinstance(given, str) else given))
        except PluginError as error:
            refusals.append(error)
    return members


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
            problems.append(
                f"'{ENGINE}' is the name of the built-in plugin; choose another for {origins}."
            )
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
