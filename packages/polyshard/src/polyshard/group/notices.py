"""Settings that change nothing where they were given: never dropped without a word."""

from __future__ import annotations

import torch

from polyshard.policies import MixedPrecisionPolicy
from polyshard.seams import Contributions


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
    """Those of the policy, and what codecs, storage, backend and observers say of the group."""
    sources: tuple[object, ...] = (
        contributions.gather_codec,
        contributions.reduce_codec,
        contributions.storage,
        contributions.backend,
        *contributions.observers,
    )
    said = (notice for source in sources for notice in getattr(source, "notices", ()))
    return (*policy_notices(policy, orig_dtype), *dict.fromkeys(said))
