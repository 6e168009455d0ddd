"""Who watches the life of groups."""

from __future__ import annotations

from typing import TYPE_CHECKING


class Observer:
    """Watches the life cycle of groups: override what should be seen.

    Must not change anything; costs nothing when absent. Groups are called by name. Names repeat
    between models: a plugin that tells models apart gives each group an observer of its own, made
    for :attr:`GroupInfo.identity`.
    """

    if TYPE_CHECKING:  # as in Named

        @property
        def notices(self) -> tuple[str, ...]:
            """What ``describe()`` says of the groups it watches."""
            raise NotImplementedError

    else:
        notices: tuple[str, ...] = ()

    def on_unshard(self, group: str, payload_bytes: int) -> None:
        """An all-gather of ``group`` starts; ``payload_bytes`` leave this rank."""

    def on_unsharded(self, group: str, wait_seconds: float) -> None:
        """The unsharded parameters are ready, after the host waited this long."""

    def on_reshard(self, group: str) -> None:
        """The unsharded parameters were freed."""

    def on_reduce(self, group: str, payload_bytes: int) -> None:
        """A gradient reduction starts; ``payload_bytes`` leave this rank."""

    def on_reduced(self, group: str, wait_seconds: float) -> None:
        """The sharded gradients are in place, after the host waited this long."""

    def on_step_end(self) -> None:
        """The backward of the root has ended: all gradients of this step are in place."""
