"""Policies for ``fully_shard``: torch's own classes, so that both engines take them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from polyshard._torch.newer import dtype_override_of
from polyshard._torch.private import DataParallelMeshDims
from polyshard.errors import SettingError

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "policy_for",
]


def policy_for(
    policy: MixedPrecisionPolicy, fqn: str, parameter: nn.Parameter
) -> MixedPrecisionPolicy:
    """``policy`` with what its ``param_dtype_override_fn`` says of ``parameter`` settled.

    Call it once for each parameter, as the function may count on.

    Raises:
        SettingError: for an answer that is neither ``None``, ``param_dtype`` nor the parameter's
            own dtype.
    """
    ask = dtype_override_of(policy)
    if ask is None:
        return policy
    answer: object = ask(parameter)
    settled: dict[str, Any] = {"param_dtype_override_fn": None}
    if answer is not None:
        allowed = (policy.param_dtype, parameter.dtype)
        if not isinstance(answer, torch.dtype) or answer not in allowed:
            raise SettingError(
                f"param_dtype_override_fn returned {answer!r} for '{fqn}'. Return None or "
                f"{policy.param_dtype} to compute with param_dtype, or {parameter.dtype} to keep "
                "the parameter's own dtype."
            )
        settled["param_dtype"] = answer
    return replace(policy, **settled)
