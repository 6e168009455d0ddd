"""Of which dtypes a group's parameters and gradients are, where.

[Note: dtypes of gradients]
A parameter may say itself of which dtype its gradients are (``grad_dtype``; ``None``: of any). That
is what its sharded gradient has then, and unless the policy names a ``reduce_dtype``, what its
gradients add up in before they are reduced. The group is reduced in the dtype that all of these
promote to. Parameters that say nothing follow the installed torch: their gradients have the
original dtype, and are reduced in it or in that of compute.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from polyshard._torch.newer import reduces_in_original_dtype
from polyshard.errors import CustomCommsError, warn
from polyshard.params.parameter import Told
from polyshard.plugins.contributions import Contributions
from polyshard.policies import MixedPrecisionPolicy
from polyshard.transport.custom import CustomComms


def policy_notices(policy: MixedPrecisionPolicy, orig_dtype: torch.dtype) -> tuple[str, ...]:
    """What of ``policy`` does not apply to parameters of ``orig_dtype``."""
    found = []
    if policy.param_dtype is not None and not orig_dtype.is_floating_point:
        found.append(
            f"param_dtype={policy.param_dtype} has no effect on {orig_dtype} parameters, which are "
            "gathered as they are"
        )
    reduce = reduce_dtype_for(policy, orig_dtype)
    if reduce is not None and policy.reduce_dtype not in (reduce, reduce.to_real()):
        found.append(
            f"reduce_dtype={policy.reduce_dtype} is {reduce} for {orig_dtype} parameters: no "
            "narrower dtype holds their imaginary parts"
        )
    return tuple(found)


def all_notices(
    policy: MixedPrecisionPolicy, orig_dtype: torch.dtype, contributions: Contributions
) -> tuple[str, ...]:
    """Those of the policy, and what the parts of plugins say of the group."""
    return (*policy_notices(policy, orig_dtype), *contributions.notices)


def has_no_buffers(setter: str, comms: Iterable[CustomComms], enable: bool = True) -> None:
    """Say that a setter of buffers for transfers changes nothing.

    Raises:
        CustomCommsError: where the user's own objects allocate them.
    """
    if any(comms):
        raise CustomCommsError(
            f"{setter}() was called on a module with a custom all-gather or reduce-scatter, which "
            "allocates by itself. Call one or the other."
        )
    if enable:
        warn(
            [
                f"{setter}() has no effect: polyshard sends parameters and gradients from where "
                "they rest and has no communication buffers to allocate elsewhere"
            ]
        )


@dataclass(frozen=True)
class Dtypes:
    """The three dtypes of a group: at rest, in compute and on the wire, in reduction."""

    orig: torch.dtype
    param: torch.dtype
    reduce: torch.dtype

    @override
    def __str__(self) -> str:
        """At rest, in compute, in reduction."""
        names = (str(d).removeprefix("torch.") for d in (self.orig, self.param, self.reduce))
        return " / ".join(names)


@dataclass(frozen=True)
class GradientDtypes:
    """Of the gradients of each parameter; ``None`` is any. See [Note: dtypes of gradients]."""

    kept: tuple[torch.dtype | None, ...]
    """While they add up unsharded."""
    placed: tuple[torch.dtype | None, ...]
    """Once they are sharded."""
    is_told: bool = False
    """Whether any parameter says what it takes."""

    def wire(self, dtypes: Dtypes) -> torch.dtype:
        """The dtype in which gradients of one backward travel. See [Note: reduction]."""
        param, reduce = dtypes.param, dtypes.reduce
        is_wider = self.is_told or param.itemsize > reduce.itemsize  # told: wider than compute
        return reduce if is_wider or param.itemsize == reduce.itemsize else param

    def open_among(self, indices: Sequence[int]) -> list[int]:
        """Those of ``indices`` for which no dtype is settled before there is a gradient."""
        return [index for index in indices if self.kept[index] is None]


def reduce_dtype_for(policy: MixedPrecisionPolicy, orig: torch.dtype) -> torch.dtype | None:
    """The policy's ``reduce_dtype``; complex for complex parameters, and never narrower than they.

    A real dtype would drop imaginary parts, and there is no complex one of bfloat16's width.
    """
    wanted = policy.reduce_dtype
    return torch.promote_types(orig, wanted) if wanted is not None and orig.is_complex else wanted


def resolve_dtypes(
    policy: MixedPrecisionPolicy, orig: torch.dtype, told: Sequence[Told | None]
) -> tuple[Dtypes, GradientDtypes]:
    """What ``policy`` makes of parameters of dtype ``orig`` that say ``told`` of their gradients.

    Defaults are the installed torch's.
    """
    param = policy.param_dtype if orig.is_floating_point else None
    compute = param or orig
    wanted = reduce_dtype_for(policy, orig)
    default = wanted or (orig if reduces_in_original_dtype() else compute)
    kept = tuple(default if t is None else wanted or t.dtype for t in told)
    placed = tuple(orig if t is None else t.dtype for t in told)
    # One of which nothing is known has the dtype that autograd computes it in, that of compute.
    found = {dtype or compute for dtype in kept}
    reduce = functools.reduce(torch.promote_types, found) if len(found) > 1 else found.pop()
    is_told = any(t is not None for t in told)
    return Dtypes(orig, compute, reduce), GradientDtypes(kept, placed, is_told)
