"""What some versions of torch have and others do not: asked of the installed one.

Imported without torch too, for the table of versions that is made from the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Feature:
    """One row of the table: since which version, and what polyshard does with one that lacks it."""

    name: str
    since: tuple[int, int]
    without: str
    probe: Callable[[], bool]


def _fsdp(name: str) -> Any:
    return getattr(import_module("torch.distributed.fsdp"), name, None)


def _has_single_collectives() -> bool:
    dist = import_module("torch.distributed")
    return hasattr(dist, "all_gather_single") and hasattr(dist, "reduce_scatter_single")


def _has_six_properties() -> bool:
    metadata = import_module("torch.distributed.checkpoint.metadata")
    return len(metadata.TensorProperties().__getstate__()) == 6


def _tells_overrides() -> bool:
    torch = import_module("torch")
    return hasattr(torch.nn.Parameter(torch.ones(1)), "_has_grad_dtype_override")


FEATURES = tuple(
    Feature(*row)
    for row in (
        ("`FSDPModule.set_keep_unsharded_storage`", (2, 15), "has the method with every version",
         lambda: hasattr(_fsdp("FSDPModule"), "set_keep_unsharded_storage")),
        ("`FSDPModule.finalize_backward`, `set_manual_backward_finalization`", (2, 15),
         "has the methods with every version",
         lambda: hasattr(_fsdp("FSDPModule"), "finalize_backward")),
        ("`GradientReductionHandle`", (2, 15),
         "`polyshard.GradientReductionHandle`, with every version",
         lambda: _fsdp("GradientReductionHandle") is not None),
        ("`MixedPrecisionPolicy(param_dtype_override_fn=)`", (2, 15),
         "`polyshard.MixedPrecisionPolicy` is torch's; a subclass may have the field",
         lambda: "param_dtype_override_fn" in _fsdp("MixedPrecisionPolicy").__dataclass_fields__),
        ("torch records whether `grad_dtype` was set", (2, 15),
         "setting `grad_dtype` to the parameter's own dtype counts as not setting it",
         _tells_overrides),
        ("`dist.all_gather_single`, `reduce_scatter_single`", (2, 13),
         "calls them by their older names", _has_single_collectives),
        ("checkpoints with six facts of a tensor", (2, 15),
         "`polyshard_checkpoint` reads them with every version", _has_six_properties),
    )
)  # fmt: skip
