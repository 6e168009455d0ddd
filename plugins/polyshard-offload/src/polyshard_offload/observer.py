"""Observes steps and reductions for the plugin as a whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from typing_extensions import override

from polyshard._torch.private import in_backward
from polyshard.errors import IneffectiveSettingWarning
from polyshard.plugins.seams import Observer

if TYPE_CHECKING:
    from polyshard_offload.optimizer.step_in_backward import BackwardSteps


class WrapWatcher(Observer):
    """Warns once when optimizer state stays where it is because the optimizer was not wrapped."""

    def __init__(
        self,
        notices: Callable[[], tuple[str, ...]],
        early: Callable[[], Iterable[BackwardSteps]] | None,
    ) -> None:
        """Nothing was wrapped yet; ``notices`` says what ``describe()`` shows.

        ``early`` gives the optimizers that step what was reduced.
        """
        self.wrapped = False
        self._steps = 0
        self._notices = notices
        self._early = early

    @property
    @override
    def notices(self) -> tuple[str, ...]:
        """Where the optimizer state rests, for models whose shards stay on the device."""
        return self._notices()

    @override
    def on_reduced(self, group: str, wait_seconds: float) -> None:
        for steps in self._early() if self._early is not None else ():
            steps.flush()

    @override
    def on_step_end(self) -> None:
        for steps in self._early() if self._early is not None and not in_backward() else ():
            steps.end()  # of finalize_backward()
        # The first step may end before anything is wrapped, the second may not.
        self._steps += 1
        if self._steps == 2 and not self.wrapped:
            warnings.warn(
                "Offload(optimizer=...) has no effect: the optimizer was not wrapped. Write "
                "optimizer = offload.wrap(torch.optim.AdamW(model.parameters())).",
                IneffectiveSettingWarning,
                stacklevel=2,
            )
