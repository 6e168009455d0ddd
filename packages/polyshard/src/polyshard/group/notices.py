"""Settings that change nothing where they were given: never dropped without a word."""

from __future__ import annotations

import torch

from polyshard.composition.roles import Contributions
from polyshard.policies import MixedPrecisionPolicy


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
