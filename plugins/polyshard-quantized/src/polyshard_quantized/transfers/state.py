"""What a reduction remembers between steps, and how a checkpoint holds it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyshard.errors import SettingError
from polyshard.plugins.seams import GroupInfo
from polyshard_quantized.layout.payload import Payload
from polyshard_quantized.transfers.feedback import Residuals


class ReductionState:
    """Reductions made so far, and the errors of one group on one rank.

    It outlives the codec that is bound to the group, which is made anew after conversions.
    """

    def __init__(self, residuals: Residuals | None) -> None:
        self.calls = 0
        self.residuals = residuals
        self.plan: Payload | None = None
        """Of the group as it was last bound."""
        self.group = ""
        self.world_size = 0
        self._fqns: tuple[str, ...] = ()
        self._device = torch.device("cpu")

    def belong_to(self, group: GroupInfo) -> None:
        """Take the group's current names."""
        self.group = str(group.identity)
        self.world_size = group.world_size
        self._fqns = tuple(p.fqn for p in group.parameters)
        self._device = group.device

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors; tensors are the live ones, as in any state dict.

        Errors that are yet to come are zeros, so that a new run can be filled from a checkpoint.
        """
        saved: dict[str, Any] = {"calls": self.calls, "world_size": self.world_size}
        if self.residuals is not None:
            if self.plan is not None:
                self.residuals.make_room(self.plan, self.world_size, self._device)
            saved["residuals"] = {
                self._fqns[index]: value for index, value in self.residuals.values.items()
            }
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` left off.

        Raises:
            SettingError: when the state is of another world size or another set of parameters.
        """
        saved = state_dict
        if saved["world_size"] != self.world_size:
            raise SettingError(
                f"quantized: the state of group '{self.group}' was saved on "
                f"{saved['world_size']} ranks and cannot be loaded on {self.world_size}: errors "
                "belong to whole gradients of single ranks. Start without it; the first "
                "reductions then lack at most one quantization error each."
            )
        residuals: dict[str, Tensor] = saved.get("residuals", {})
        unknown = sorted(set(residuals) - set(self._fqns))
        if unknown:
            raise SettingError(
                f"quantized: the state of group '{self.group}' holds errors of {unknown}, which "
                "the group does not have. Load the state of the same model."
            )
        self.calls = int(saved["calls"])
        if self.residuals is not None:
            self.residuals.values = {
                self._fqns.index(fqn): value.detach().to(self._device, torch.float32, copy=True)
                for fqn, value in residuals.items()
            }
