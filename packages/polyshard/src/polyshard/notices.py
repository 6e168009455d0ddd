"""Settings that change nothing where they were given: never dropped without a word."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch.distributed.tensor import Shard

from polyshard.errors import IneffectiveSettingWarning
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


def placement_notice(fqn: str, placement: Shard) -> str:
    """What to say of a dim chosen for a parameter without dims."""
    return (
        f"shard_placement_fn returned {placement} for '{fqn}', which has no effect: it has no "
        "dims and stays whole on every rank"
    )


def without_buffers(setter: str) -> str:
    """What to say of a setter for memory that is not there."""
    return (
        f"{setter}() has no effect: polyshard sends parameters and gradients from where they rest "
        "and has no communication buffers to allocate elsewhere"
    )


def warn(notices: Iterable[str]) -> None:
    """Say each once (by Python's filter of repeated warnings)."""
    for notice in notices:
        warnings.warn(notice, IneffectiveSettingWarning, stacklevel=2)
