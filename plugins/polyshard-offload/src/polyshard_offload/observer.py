"""Hears of steps and reductions for the plugin as a whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from typing_extensions import override

from polyshard.errors import IneffectiveSettingWarning
from polyshard.plugins.seams import Observer


class WrapWatcher(Observer):
    """Says once when the optimizer state stays where it is because nobody wrapped the optimizer."""

    def __init__(
        self, notices: Callable[[], tuple[str, ...]], flush: Callable[[], None] | None
    ) -> None:
        """Nothing was wrapped yet; ``notices`` says what ``describe()`` shows.

        ``flush``, if any, is called when a group was reduced.
        """
        self.wrapped = False
        self._steps = 0
        self._notices = notices
        self._flush = flush

    @property
    @override
    def notices(self) -> tuple[str, ...]:
        """Where the optimizer state rests, for models whose shards stay on the device."""
        return self._notices()

    @override
    def on_reduced(self, group: str, wait_seconds: float) -> None:
        if self._flush is not None:
            self._flush()

    @override
    def on_step_end(self) -> None:
        # The first step may end before anything is wrapped, the second may not.
        self._steps += 1
        if self._steps == 2 and not self.wrapped:
            warnings.warn(
                "Offload(optimizer=...) has no effect: the optimizer was not wrapped. Write "
                "optimizer = offload.wrap(torch.optim.AdamW(model.parameters())).",
                IneffectiveSettingWarning,
                stacklevel=2,
            )
