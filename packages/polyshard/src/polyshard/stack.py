"""The plugins of one ``fully_shard`` call: resolved, checked, ordered, and asked per group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard.builtin import EnginePlugin
from polyshard.contract import Contract
from polyshard.discovery import load_plugin
from polyshard.errors import ConflictError, PluginError
from polyshard.manager import Answer, Implementation, Manager, Member, problems_of
from polyshard.onion import Onion, name_of
from polyshard.ordering import check_relations, order
from polyshard.parameter_hooks import ParameterHooks
from polyshard.seams import (
    CollectivesBackend,
    Contributions,
    GatherCodec,
    GroupInfo,
    Observer,
    ParamInfo,
    ReduceCodec,
    ShardingConstraint,
    StateDictAdapter,
    StorageFactory,
)

ENGINE = EnginePlugin.name

SEAMS: Mapping[str, type] = MappingProxyType(
    {
        "polyshard_shard_storage": StorageFactory,
        "polyshard_collectives_backend": CollectivesBackend,
        "polyshard_gather_codec": GatherCodec,
        "polyshard_reduce_codec": ReduceCodec,
        "polyshard_sharding_constraint": ShardingConstraint,
        "polyshard_observer": Observer,
        "polyshard_state_dict_adapter": StateDictAdapter,
    }
)
"""Hooks asked once for each group, and the protocol an answer follows."""

ROLES: Mapping[str, str] = MappingProxyType(
    {
        "polyshard_shard_storage": "the shard storage",
        "polyshard_collectives_backend": "the collectives",
        "polyshard_gather_codec": "the gather codec",
        "polyshard_reduce_codec": "the reduce codec",
    }
)
"""The exclusive ones among them, in the words of a conflict."""


@dataclass(frozen=True)
class PluginTransform:
    """One plugin's layer of the onion: its own functions, because steps run them on gradients."""

    member: Member
    flattening: Implementation
    unflattening: Implementation | None

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

    def unflatten(self, tensor: Tensor, param_extension: Any, param: ParamInfo | None) -> Tensor:
        """Ask ``post_unflatten_transform`` with the extension of :meth:`flatten`."""
        given = {"tensor": tensor, "param_extension": param_extension, "param": param}
        answer: Tensor | None = self.unflattening(given) if self.unflattening else None
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
        self._onion = Onion(list(_layers(self._manager)))

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
        return self._onion

    @property
    def parameter_hooks(self) -> ParameterHooks:
        """The exclusive hooks of single parameters."""
        return ParameterHooks(self._manager, ENGINE)

    def prepare(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Let every plugin change the module before its parameters are collected.

        Raises:
            PluginError: for a plugin that returns another module, which would be lost.
        """
        for answer in self._manager.ask("polyshard_prepare_model", module=module, mesh=mesh):
            if answer.value is not module:
                raise PluginError(
                    f"plugin {answer.member.label} returned a {type(answer.value).__name__} from "
                    "polyshard_prepare_model, which would be dropped; change the module in place."
                )

    def contributions(self, group: GroupInfo) -> Contributions:
        """Who does what for ``group``: everything claimed, checked, then frozen.

        Raises:
            ConflictError: listing every role that two plugins claim.
            PluginError: listing every answer that is not what its hook asks for.
        """
        answers = {hook: self._manager.ask(hook, group=group) for hook in SEAMS}
        problems = [p for hook, given in answers.items() for p in _misfits(hook, given)]
        if problems:
            raise PluginError("\n".join(problems))
        conflicts = [
            text for hook, role in ROLES.items() if (text := _conflict(role, answers[hook], group))
        ]
        if conflicts:
            raise ConflictError("\n".join(conflicts))
        return Contributions(
            gather_codec=_winner(answers["polyshard_gather_codec"]),
            reduce_codec=_winner(answers["polyshard_reduce_codec"]),
            storage=_winner(answers["polyshard_shard_storage"]),
            backend=_winner(answers["polyshard_collectives_backend"]),
            constraints=_values(answers["polyshard_sharding_constraint"]),
            observers=_values(answers["polyshard_observer"]),
            adapters=_values(answers["polyshard_state_dict_adapter"]),
            plugin_lines=self.lines(),
        )


@functools.cache
def _members_of(seam: type) -> tuple[str, ...]:
    """Public names that a protocol asks for."""
    own = [base for base in seam.__mro__ if base.__module__ == seam.__module__]
    return tuple(sorted({n for base in own for n in vars(base) if not n.startswith("_")}))


def _misfits(hook: str, answers: Sequence[Answer]) -> Iterator[str]:
    """Answers that would fail only later, far from the plugin that gave them."""
    seam = SEAMS[hook]
    for answer in answers:
        who = f"plugin {answer.member.label}: {hook} returned"
        if isinstance(answer.value, type):
            yield f"{who} the class {answer.value.__name__}; return an instance"
            continue
        missing = [n for n in _members_of(seam) if not hasattr(answer.value, n)]
        if missing:
            yield (
                f"{who} a {type(answer.value).__name__}, which lacks {', '.join(missing)} of "
                f"polyshard.seams.{seam.__name__}"
            )


def _values(answers: Sequence[Answer]) -> tuple[Any, ...]:
    return tuple(answer.value for answer in answers)


def _claims(answers: Sequence[Answer]) -> list[Answer]:
    return [a for a in answers if a.member.contract.name != ENGINE]


def _layers(manager: Manager) -> Iterator[PluginTransform]:
    for member in manager.implements("pre_flatten_transform"):
        flattening = manager.implementation("pre_flatten_transform", member)
        assert flattening is not None
        undo = manager.implementation("post_unflatten_transform", member)
        yield PluginTransform(member, flattening, undo)


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
        PluginError: for everything that is wrong with any of the plugins, at once.
        ConflictError: when they exclude each other, or cannot be ordered, and all else is well.
    """
    if isinstance(plugins, str):
        raise PluginError(f"plugins= takes a list, got the string '{plugins}'; pass ['{plugins}'].")
    refusals: list[PluginError] = []
    members = _resolve(plugins, refusals)
    contracts = [m.contract for m in members]
    if not refusals:  # else what seems to be missing may be what could not be loaded
        _keep(refusals, lambda: _check_names(contracts))
        _keep(refusals, lambda: check_relations(contracts))
    ordered: list[str] = []
    if not refusals:
        _keep(refusals, lambda: ordered.extend(order(contracts)))
    if refusals:
        _refuse(refusals, members)
    by_name = {m.contract.name: m for m in members}
    return PluginStack([*(by_name[name] for name in ordered), Member.of(EnginePlugin())])


def _resolve(plugins: Sequence[object | str], refusals: list[PluginError]) -> list[Member]:
    members: list[Member] = []
    for given in plugins:
        try:
            members.append(Member.of(load_plugin(given) if isinstance(given, str) else given))
        except PluginError as error:
            refusals.append(error)
    return members


def _check_names(contracts: Sequence[Contract]) -> None:
    if any(contract.name == ENGINE for contract in contracts):
        raise PluginError(f"'{ENGINE}' is the name of the built-in plugin; choose another.")


def _keep(refusals: list[PluginError], check: Callable[[], None]) -> None:
    try:
        check()
    except PluginError as error:
        refusals.append(error)


def _refuse(refusals: Sequence[PluginError], members: Sequence[Member]) -> NoReturn:
    """Raise what was found together with everything the manager would object to."""
    objections = [
        f"plugin {m.label}: {problem}" for m in members for problem in problems_of(m.plugin)
    ]
    if len(refusals) == 1 and not objections:
        raise refusals[0]
    conflicts_only = not objections and all(isinstance(r, ConflictError) for r in refusals)
    kind = ConflictError if conflicts_only else PluginError
    raise kind("\n".join([*map(str, refusals), *objections])) from refusals[0]
