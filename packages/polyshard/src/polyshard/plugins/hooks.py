"""The hooks of one stack as typed functions: the only file that calls the manager.

Each asks every plugin that implements the hook, in plugin order, and gives the answers with the
names of those who gave them. How answers combine is for the callers
(``claims``, ``transforms``), but for the four exclusive hooks about one parameter
(:class:`ParameterHooks`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard.plugins.manager import Answer, Implementation, Manager, Member
from polyshard.plugins.roles import RANKS_MAY_DIFFER, GroupHook
from polyshard.plugins.transforms import name_of
from polyshard.errors import ConflictError
from polyshard.plugins import hookspecs
from polyshard.plugins.seams import GroupInfo, ParamInfo


class Teardown:
    """What plugins undo of a group: when they are told to, or when nobody holds the group any more.

    An object that the group owns instead of a finalizer: those are held by the interpreter with
    all they need, so that a plugin which knows its model would keep that alive.
    """

    def __init__(
        self, implementations: Sequence[Implementation], group: GroupInfo, name: object
    ) -> None:
        """``implementations`` are in plugin order.

        ``name`` is asked what the group is called (``str(name)``) when it goes.
        """
        self.is_done = False
        self._implementations = implementations
        self._group = group
        self._name = name

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
            group = replace(self._group, name=str(self._name))
            try:
                implementation({"group": group})
            except Exception as error:
                error.add_note(f"while letting go of group '{group.name}'")
                errors.append(error)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"and then: {other!r} ({'; '.join(other.__notes__)})")
            raise errors[0]

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """The group is gone. A process that ends gives everything back by itself."""
        if not is_finalizing():
            self.run()


P = ParamSpec("P")
T = TypeVar("T")


class ParameterHook(Generic[P, T]):
    """An exclusive hook about one parameter: whoever claims it answers, else the engine.

    Called as its specification says, whose signature mypy takes from there.
    """

    def __init__(self, manager: Manager, spec: Callable[P, T | None], engine: str) -> None:
        """``engine`` is the name of the plugin whose answer yields to any other."""
        self._manager = manager
        self._hook = spec.__name__
        every = inspect.signature(spec)
        self._signature = every.replace(parameters=list(map(_optional, every.parameters.values())))
        self._engine = engine

    def claimed(self, *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The answer of the only plugin that has one; ``None`` if none does.

        Raises:
            ConflictError: naming the plugins, where several do.
        """
        return self._claim(self._bound(*args, **kwargs))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """The answer of the only plugin that has one, else the engine's.

        Raises:
            ConflictError: as :meth:`claimed`.
        """
        given = self._bound(*args, **kwargs)
        claim = self._claim(given)
        # Only now: the engine need not understand what a plugin claims.
        return self._ask(given)[0].value if claim is None else claim

    def _bound(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _claim(self, given: dict[str, Any]) -> T | None:
        claims = self._ask(given, leave_out=self._engine)
        if len(claims) > 1:
            plugins = " and ".join(claim.member.label for claim in claims)
            raise ConflictError(
                f"plugins {plugins} both answer {self._hook} for {name_of(given['param'])}. Pass "
                "only one of them, or narrow one so that it returns None for this parameter."
            )
        return claims[0].value if claims else None

    def _ask(self, given: dict[str, Any], leave_out: str = "") -> list[Answer[T]]:
        return self._manager.ask(self._hook, leave_out=leave_out, **given)


def _optional(parameter: inspect.Parameter) -> inspect.Parameter:
    """With a default where FSDP1 says nothing; specifications have none, as pluggy wants it."""
    return parameter.replace(default=None) if parameter.name in {"device", "param"} else parameter


class ParameterHooks:
    """The four that mirror torch's ``FSDPExtensions``."""

    def __init__(self, manager: Manager, engine: str) -> None:
        """``engine`` is the name of the plugin whose answers yield to any other."""
        self.chunk_tensor = ParameterHook(manager, hookspecs.chunk_tensor, engine)
        self.chunk_dtensor = ParameterHook(manager, hookspecs.chunk_dtensor, engine)
        self.all_gather_dtensor = ParameterHook(manager, hookspecs.all_gather_dtensor, engine)
        self.pre_load_state_dict_transform = ParameterHook(
            manager, hookspecs.pre_load_state_dict_transform, engine
        )


class Hooks:
    """What :mod:`polyshard.plugins.hookspecs` says, callable. ``None`` answers are left out."""

    def __init__(self, manager: Manager, engine: str) -> None:
        """``manager`` holds the plugins of the stack in order, ``engine`` among them."""
        self._manager = manager
        self.parameter = ParameterHooks(manager, engine)

    def layers(self) -> list[tuple[Member, Implementation, Implementation]]:
        """Each plugin that transforms parameters, with its two functions.

        They are called during steps, without the manager.
        """
        flattening = self._manager.implementations("pre_flatten_transform")
        unflattening = self._manager.implementations("post_unflatten_transform")
        undo = {id(i.member): i for i in unflattening}
        return [(i.member, i, undo[id(i.member)]) for i in flattening]

    def is_local(self, member: Member) -> bool:
        """Whether a plugin only looks on, so that ranks need not have it alike."""
        return self._manager.hooks_of(member) <= RANKS_MAY_DIFFER

    def teardown(self, group: GroupInfo, name: object) -> Teardown:
        """``polyshard_teardown``, for when ``group`` goes; ``str(name)`` is its name then."""
        return Teardown(self._manager.implementations("polyshard_teardown"), group, name)

    def prepare_model(self, module: nn.Module, mesh: DeviceMesh) -> list[Answer[object]]:
        """``polyshard_prepare_model``."""
        return self._manager.ask("polyshard_prepare_model", module=module, mesh=mesh)

    def of_group(self, row: GroupHook[T], group: GroupInfo) -> list[Answer[T]]:
        """One of the hooks of :mod:`~polyshard.plugins.roles`."""
        return self._manager.ask(row.hook, group=group)

    def parameter_facts(self, tensor: Tensor, param: ParamInfo) -> list[Answer[str]]:
        """``polyshard_parameter_facts``."""
        return self._manager.ask("polyshard_parameter_facts", tensor=tensor, param=param)
