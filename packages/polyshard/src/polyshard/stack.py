"""The plugins of one ``fully_shard`` call: resolved, checked, ordered, and asked per group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard.builtin import EnginePlugin
from polyshard.discovery import load_plugin
from polyshard.errors import ConflictError, PluginError
from polyshard.manager import Answer, Manager, Member
from polyshard.onion import Onion, name_of
from polyshard.ordering import check_relations, order
from polyshard.parameter_hooks import ParameterHooks
from polyshard.seams import Contributions, GroupInfo, ParamInfo

ENGINE = EnginePlugin.name


@dataclass(frozen=True)
class PluginTransform:
    """One plugin's layer of the onion."""

    manager: Manager
    member: Member

    @property
    def name(self) -> str:
        """Of the plugin."""
        return self.member.contract.name

    @property
    def settings(self) -> str:
        """Of the plugin."""
        return self.member.settings

    def flatten(self, tensor: Tensor, param: ParamInfo | None) -> tuple[Tensor, Any | None]:
        """Ask ``pre_flatten_transform``; no answer means the tensor itself."""
        answer = self.manager.ask_member(
            "pre_flatten_transform", self.member, tensor=tensor, param=param
        )
        if answer is None:
            return tensor, None
        flat, extension = answer
        return flat, extension

    def unflatten(self, tensor: Tensor, param_extension: Any, param: ParamInfo | None) -> Tensor:
        """Ask ``post_unflatten_transform`` with the extension of :meth:`flatten`."""
        answer: Tensor | None = self.manager.ask_member(
            "post_unflatten_transform",
            self.member,
            tensor=tensor,
            param_extension=param_extension,
            param=param,
        )
        if answer is None:
            raise PluginError(
                f"plugin {self.member.label} flattened {name_of(param)} but gave no answer in "
                "post_unflatten_transform; return the unflattened tensor."
            )
        return answer


class PluginStack:
    """Plugins in order. Immutable; the same plugin objects may serve many stacks."""

    def __init__(self, members: Sequence[Member]) -> None:
        """``members`` are in plugin order, the engine last."""
        self._members = tuple(members)
        self._manager = Manager(members)

    def lines(self) -> tuple[str, ...]:
        """One line per plugin, engine excluded: what ranks compare."""
        return tuple(
            f"{m.contract.name} {m.contract.version}" + (f" ({m.settings})" if m.settings else "")
            for m in self._members
            if m.contract.name != ENGINE
        )

    @property
    def onion(self) -> Onion:
        """The transforms of all plugins, in plugin order."""
        members = self._manager.implements("pre_flatten_transform")
        return Onion([PluginTransform(self._manager, member) for member in members])

    @property
    def parameter_hooks(self) -> ParameterHooks:
        """The exclusive hooks of single parameters."""
        return ParameterHooks(self._manager, ENGINE)

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Let every plugin change the module before its parameters are collected."""
        self._manager.ask("polyshard_prepare_model", module=module, mesh=mesh)

    def contributions(self, group: GroupInfo) -> Contributions:
        """Who does what for ``group``: everything claimed, checked, then frozen.

        Raises:
            ConflictError: listing every role that two plugins claim.
        """
        roles = {
            "the shard storage": self._manager.ask("polyshard_shard_storage", group=group),
            "the collectives": self._manager.ask("polyshard_collectives_backend", group=group),
            "the gather codec": self._manager.ask("polyshard_gather_codec", group=group),
            "the reduce codec": self._manager.ask("polyshard_reduce_codec", group=group),
        }
        conflicts = [
            text for role, answers in roles.items() if (text := _conflict(role, answers, group))
        ]
        if conflicts:
            raise ConflictError("\n".join(conflicts))
        storage, backend, gather, reduce = (_winner(a) for a in roles.values())
        return Contributions(
            gather_codec=gather,
            reduce_codec=reduce,
            storage=storage,
            backend=backend,
            constraints=self._all("polyshard_sharding_constraint", group),
            observers=self._all("polyshard_observer", group),
            adapters=self._all("polyshard_state_dict_adapter", group),
            plugin_lines=self.lines(),
        )

    def _all(self, hook: str, group: GroupInfo) -> tuple[Any, ...]:
        return tuple(answer.value for answer in self._manager.ask(hook, group=group))


def _claims(answers: Sequence[Answer]) -> list[Answer]:
    return [a for a in answers if a.member.contract.name != ENGINE]


def _conflict(role: str, answers: Sequence[Answer], group: GroupInfo) -> str | None:
    claims = _claims(answers)
    if len(claims) < 2:
        return None
    plugins = " and ".join(claim.member.label for claim in claims)
    parameters = [p.fqn for p in group.parameters]
    shown = ", ".join(parameters[:4]) + (", ..." if len(parameters) > 4 else "")
    return (
        f"plugins {plugins} both claim {role} of group '{group.name}' ({shown}). Pass only one of "
        "them for this unit, or narrow one so that it returns None here."
    )


def _winner(answers: Sequence[Answer]) -> Any:
    claims = _claims(answers)
    return (claims or answers)[0].value


def build_stack(plugins: Sequence[object | str]) -> PluginStack:
    """Resolve names, check contracts, order, and register.

    Args:
        plugins: plugin objects, or names of installed plugins.

    Raises:
        PluginError: for everything that is wrong with any of the plugins.
        ConflictError: when they exclude each other, or cannot be ordered.
    """
    if isinstance(plugins, str):
        raise PluginError(f"plugins= takes a list, got the string '{plugins}'; pass ['{plugins}'].")
    given = [load_plugin(p) if isinstance(p, str) else p for p in plugins]
    members = {m.contract.name: m for m in (Member.of(p) for p in given)}
    if len(members) < len(given) or members:
        check_relations([Member.of(p).contract for p in given])
    if ENGINE in members:
        raise PluginError(f"'{ENGINE}' is the name of the built-in plugin; choose another.")
    ordered = [members[name] for name in order([m.contract for m in members.values()])]
    return PluginStack([*ordered, Member.of(EnginePlugin())])
