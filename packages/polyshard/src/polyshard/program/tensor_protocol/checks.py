"""What FSDP2's tensor-subclass protocol cannot express, refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from polyshard._torch.private import has_fsdp_protocol
from polyshard.errors import (
    ConflictError,
    ModuleError,
    ProtocolError,
    UnsupportedError,
)
from polyshard.params.parameter import Source
from polyshard.plugins.contributions import GATHER_CODEC, LANDING, STORAGE, Contributions, Role
from polyshard.plugins.seams import GroupInfo

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


def check_protocol(fqn: str, value: Tensor, dim: int | None) -> None:
    """Refuse half a protocol, and what it cannot express.

    Raises:
        ModuleError: naming the parameter and the tensor class.
    """
    kind = type(value).__name__
    missing = [name for name in (PRE, POST) if not hasattr(value, name)]
    if missing:
        raise ProtocolError(
            f"'{fqn}' is a {kind} that lacks {missing[0]}; FSDP2's protocol needs both {PRE} and "
            f"{POST}."
        )
    if dim != 0:
        raise ModuleError(
            f"'{fqn}' is a {kind} with FSDP2's protocol: shard it on dim 0, not {dim}."
        )
    count = len(inspect.signature(getattr(value, PRE)).parameters)
    if count not in (1, 5):
        raise ProtocolError(
            f"'{fqn}': {kind}.{PRE} takes {count} arguments; FSDP2's protocol has (mesh) or (mesh, "
            "outer_size, outer_stride, module, mp_policy)."
        )


def releases_outputs(fqn: str, value: Tensor) -> bool:
    """Whether what arrived may be freed as soon as the unsharded parameter was made of it.

    Raises:
        ModuleError: for an answer that is neither ``True`` nor ``False``.
    """
    ask: Callable[[], object] | None = getattr(value, RELEASE, None)
    answer = False if ask is None else ask()
    if not isinstance(answer, bool):
        raise ModuleError(
            f"'{fqn}': {type(value).__name__}.{RELEASE} returned {answer!r}; it must be a bool."
        )
    return answer


def refuse_claims(contributions: Contributions, group: GroupInfo) -> None:
    """Refuse plugins that want what the tensor class decides.

    Raises:
        ConflictError: naming the roles, the group and its parameters.
    """
    decided: tuple[Role[Any], ...] = (GATHER_CODEC, LANDING, STORAGE)
    claimed = [
        f"{role.name} '{contributions[role].name}'"
        for role in decided
        if type(contributions[role]) is not role.engine
    ]
    if claimed:
        names = ", ".join(p.fqn for p in group.parameters)
        raise ConflictError(
            f"the tensors of group '{group.identity}' ({names}) bring FSDP2's all-gather protocol, "
            f"and a plugin claims its {' and '.join(claimed)}. Leave them to one of the two: "
            "drop the plugin for this unit, or have it return None for this group."
        )


def refuse_block(block_size: int | None, group: GroupInfo) -> None:
    """Refuse blocks: what such a tensor becomes is its class's own business.

    Raises:
        UnsupportedError: naming the parameters.
    """
    if block_size is not None:
        names = ", ".join(p.fqn for p in group.parameters)
        raise UnsupportedError(
            f"reshard_after_forward={block_size} is not supported for tensors that bring FSDP2's "
            f"all-gather protocol ({names}). Pass True or False for this unit."
        )


def uses_protocol(sources: Sequence[Source]) -> bool:
    """Whether a group's parameters bring FSDP2's protocol (all do, or none)."""
    return has_fsdp_protocol(sources[0].value)
