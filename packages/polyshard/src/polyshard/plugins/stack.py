"""The plugins of one ``fully_shard`` call: resolved, checked, ordered, and asked while it plans.

A step asks none of them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard.errors import ConflictError, PluginError, call_all
from polyshard.plugins.contract import in_order, problems_between
from polyshard.plugins.contributions import Contributions, contributions_of
from polyshard.plugins.discovery import load_plugin
from polyshard.plugins.member import ENGINE, Member
from polyshard.plugins.seams import GroupInfo, ParamInfo
from polyshard.plugins.transforms import TransformStack, name_of
from polyshard.plugins.validation import hook_arguments

P = ParamSpec("P")
T = TypeVar("T")
TEARDOWN = "polyshard_teardown"


class Teardown:
    """What plugins undo of a group: when they are told to, or when the group is held no more.

    An object that the group owns instead of a finalizer: those are held by the interpreter with
    all they need, so that a plugin which knows its model would keep that alive.
    """

    def __init__(self, members: Sequence[Member], group: GroupInfo) -> None:
        """``members`` are in plugin order."""
        self.is_done = False
        self._members, self._group = members, group

    def run(self) -> None:
        """Call each plugin, the last one first, whatever another one raises."""
        if self.is_done:
            return
        self.is_done = True
        given = {"group": self._group}
        try:
            call_all(partial(m.call, TEARDOWN, given) for m in reversed(self._members))
        except Exception as error:
            error.add_note(f"while letting go of group '{self._group.identity}'")
            raise

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """The group is gone. A process that ends gives everything back by itself."""
        if not is_finalizing():
            self.run()


class PluginStack:
    """Plugins in order. Immutable; the same plugin objects may serve many stacks."""

    def __init__(self, members: Sequence[Member]) -> None:
        """``members`` have been checked."""
        self._members = tuple(members)
        self.transforms = TransformStack(self._members)

    @property
    def plugins(self) -> tuple[object, ...]:
        """The plugins themselves, in order."""
        return tuple(member.plugin for member in self._members)

    def lines(self) -> tuple[str, ...]:
        """One line per plugin."""
        return tuple(member.line for member in self._members)

    def joined(self, plugin: object) -> PluginStack:
        """The same plugins and one more."""
        return build_stack([*self.plugins, plugin])

    def ask(self, hook: str, **given: Any) -> list[tuple[Member, Any]]:
        """What plugins answer to ``hook``, in plugin order; ``None`` is no answer."""
        assert given.keys() == set(hook_arguments()[hook]), hook
        answers = [(m, m.call(hook, given)) for m in self._members if hook in m.hooks]
        return [(member, value) for member, value in answers if value is not None]

    def claimed(self, spec: Callable[P, T | None], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What the only plugin that has one answers to an exclusive hook about one parameter.

        ``spec`` is the hook in :mod:`~polyshard.plugins.hookspecs`; ``None`` if no plugin answers.
        """
        given = inspect.signature(spec).bind(*args, **kwargs).arguments
        claims = self.ask(spec.__name__, **given)
        if len(claims) > 1:
            plugins = " and ".join(member.label for member, _ in claims)
            raise ConflictError(
                f"plugins {plugins} both answer {spec.__name__} for {name_of(given['param'])}. "
                "Pass only one of them, or narrow one so that it returns None for this parameter."
            )
        return claims[0][1] if claims else None

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Let every plugin change the module before its parameters are collected."""
        for member, answer in self.ask("polyshard_prepare_model", module=module, mesh=mesh):
            if answer is not module:
                raise PluginError(
                    f"plugin {member.label} returned a {type(answer).__name__} from "
                    "polyshard_prepare_model, which would be dropped; change the module in place."
                )

    def facts(self, tensor: Tensor, param: ParamInfo) -> tuple[str, ...]:
        """What plugins say of a parameter."""
        answers = self.ask("polyshard_parameter_facts", tensor=tensor, param=param)
        for member, answer in answers:
            if not isinstance(answer, str) or "\n" in answer:
                raise PluginError(
                    f"plugin {member.label} returned {answer!r} from polyshard_parameter_facts for "
                    f"{name_of(param)}; return one line of text."
                )
        return tuple(answer for _, answer in answers)

    def contributions(self, group: GroupInfo) -> Contributions:
        """Which part takes each role of ``group``."""
        return contributions_of(partial(self.ask, group=group), group, self._members)

    def teardown(self, group: GroupInfo) -> Teardown:
        """What plugins undo when ``group`` goes."""
        return Teardown([m for m in self._members if TEARDOWN in m.hooks], group)


def build_stack(plugins: Sequence[object | str]) -> PluginStack:
    """The stack of ``plugins``, objects or names of installed ones: checked, and in order.

    Raises:
        PluginError: for everything that is wrong with any of the plugins, at once.
        ConflictError: when they exclude each other, or cannot be ordered, and all else is well.
    """
    if isinstance(plugins, str):
        raise PluginError(f"plugins= takes a list, got the string '{plugins}'; pass ['{plugins}'].")
    problems: list[PluginError] = []
    members: list[Member] = []
    for given in plugins:
        try:
            members.append(Member.of(load_plugin(given) if isinstance(given, str) else given))
        except PluginError as error:
            problems.append(error)
    contracts = [member.contract for member in members]
    if not problems:  # else what seems to be missing may be what could not be loaded
        problems += [*_same_names(members), *problems_between(contracts)]
    for member in members:
        problems += (PluginError(f"plugin {member.label}: {each}") for each in member.problems)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        is_conflict = all(isinstance(problem, ConflictError) for problem in problems)
        kind = ConflictError if is_conflict else PluginError
        raise kind("\n".join(map(str, problems))) from problems[0]
    by_name = {member.name: member for member in members}
    return PluginStack([by_name[name] for name in in_order(contracts)])


def _same_names(members: Sequence[Member]) -> Iterator[PluginError]:
    """What has the name of another plugin, or of the engine, and where each comes from."""
    by_name: dict[str, list[Member]] = {ENGINE: []}
    for member in members:
        by_name.setdefault(member.name, []).append(member)
    for name, same in by_name.items():
        origins = " and ".join(f"{m.origin} ({m.contract.version})" for m in same)
        if name == ENGINE and same:
            yield PluginError(f"'{ENGINE}' is the name of the engine; rename {origins}.")
        elif len(same) > 1:
            yield PluginError(
                f"{len(same)} plugins are named '{name}': {origins}; pass one of them."
            )
