"""Every private torch name the plugin uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

__all__ = ["adjusted_lr", "orthogonalized"]


def orthogonalized(update: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """What ``torch.optim.Muon`` makes of a 2-D ``update``: bf16."""
    made: Tensor = _zeropower_via_newtonschulz(
        update, settings["ns_coefficients"], settings["ns_steps"], settings["eps"]
    )
    return made


def adjusted_lr(settings: Mapping[str, Any], shape: tuple[int, int]) -> float:
    """The rate ``torch.optim.Muon`` takes for a matrix of ``shape``."""
    lr = float(settings["lr"])
    return float(_adjust_lr(lr, settings["adjust_lr_fn"], cast("Any", shape)))
