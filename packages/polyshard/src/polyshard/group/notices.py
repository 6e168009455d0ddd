"""Settings that change nothing where they were given: never dropped without a word."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from polyshard.composition.roles import Contributions
from polyshard.errors import CustomCommsError, warn
from polyshard.policies import MixedPrecisionPolicy
from polyshard.transport.custom import CustomComms


def policy_notices(policy: MixedPrecisionPolicy, orig_dtype: torch.dtype) -> tuple[str, ...]:
    """What of ``policy`` does not apply to parameters of ``orig_dtype``."""
    if policy.param_dtype is None or orig_dtype.is_floating_point:
        return ()
    return (
        f"param_dtype={policy.param_dtype} has no effect on {orig_dtype} parameters, which are "
        "gathered as they are",
    )


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
