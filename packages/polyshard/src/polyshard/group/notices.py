"""Settings that change nothing where they were given: never dropped without a word."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from polyshard.composition.roles import Contributions
from polyshard.errors import CustomCommsError, warn
from polyshard.group.dtypes import reduce_dtype_for
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
