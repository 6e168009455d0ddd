"""What some versions of torch have and others do not: asked of the installed one.

Usage: python tools/torch_features.py     (prints one JSON object: feature, whether it is there)

Imported without torch too, for the table of versions that is made from the answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """One row of the table: since which version, and what polyshard does with one that lacks it."""

    name: str
    since: tuple[int, int]
    without: str
    probe: Callable[[], bool]


def _has_method(name: str) -> Callable[[], bool]:
    def probe() -> bool:
        from torch.distributed.fsdp import FSDPModule

        return hasattr(FSDPModule, name)

    return probe


def _takes_overrides() -> bool:
    import dataclasses

    from torch.distributed.fsdp import MixedPrecisionPolicy

    names = {field.name for field in dataclasses.fields(MixedPrecisionPolicy)}
    return "param_dtype_override_fn" in names


def _has_handle() -> bool:
    from torch.distributed import fsdp

    return hasattr(fsdp, "GradientReductionHandle")


def _has_single_collectives() -> bool:
    import torch.distributed as dist

    return hasattr(dist, "all_gather_single") and hasattr(dist, "reduce_scatter_single")


def _has_six_properties() -> bool:
    from torch.distributed.checkpoint.metadata import TensorProperties

    state: tuple[object, ...] = TensorProperties().__getstate__()
    return len(state) == 6


def _tells_overrides() -> bool:
    import torch

    return hasattr(torch.nn.Parameter(torch.ones(1)), "_has_grad_dtype_override")


FEATURES = (
    Feature(
        "`FSDPModule.set_keep_unsharded_storage`",
        (2, 15),
        "has the method with every version",
        _has_method("set_keep_unsharded_storage"),
    ),
    Feature(
        "`FSDPModule.finalize_backward`, `set_manual_backward_finalization`",
        (2, 15),
        "has the methods with every version",
        _has_method("finalize_backward"),
    ),
    Feature(
        "`GradientReductionHandle`",
        (2, 15),
        "`polyshard.GradientReductionHandle`, with every version",
        _has_handle,
    ),
    Feature(
        "`MixedPrecisionPolicy(param_dtype_override_fn=)`",
        (2, 15),
        "`polyshard.MixedPrecisionPolicy` is torch's; a subclass may have the field",
        _takes_overrides,
    ),
    Feature(
        "`grad_dtype` of a parameter can be told from its default",
        (2, 15),
        "told the dtype that it has is as not told",
        _tells_overrides,
    ),
    Feature(
        "`dist.all_gather_single`, `reduce_scatter_single`",
        (2, 13),
        "calls them by their older names",
        _has_single_collectives,
    ),
    Feature(
        "checkpoints with six facts of a tensor",
        (2, 15),
        "`polyshard.checkpoint` reads them with every version",
        _has_six_properties,
    ),
)


def main() -> None:
    """Ask the installed torch."""
    print(json.dumps({feature.name: feature.probe() for feature in FEATURES}))


if __name__ == "__main__":
    main()
