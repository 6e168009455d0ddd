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


class StepObserver(Observer):
    """Hears more of a step: when units compute, and what moves beside gathers and reductions.

    Units are called by name; a group has the name of its unit, and a number where a unit has
    several. Seconds are the host's: on an accelerator they end when work was launched. Every begin
    is followed by its end, or by :meth:`on_broken`.
    """

    def on_start(self, group: str, what: str) -> None:
        """A gather (``what`` is ``"gather"``) or a reduction (``"reduce"``) is about to start.

        :meth:`on_unshard` or :meth:`on_reduce` follows when it has, by which time peers may have
        got all they need; not so where starting failed, or there was nothing to reduce.
        """

    def on_forward(self, unit: str) -> None:
        """A module of ``unit`` runs, gathered; units inside of it run before its end.

        Activation checkpointing runs it again, in backward.
        """

    def on_forward_end(self, unit: str) -> None:
        """The module has returned or raised."""

    def on_backward(self, unit: str) -> None:
        """The backward of ``unit`` computes, gathered; others may begin before its end."""

    def on_backward_end(self, unit: str) -> None:
        """Its gradients are there, or the backward as a whole has ended."""

    def on_replicas_summed(self, group: str, payload_bytes: int, seconds: float) -> None:
        """``payload_bytes`` of gradients were summed over replicas, which took the host so long.

        Not told of gradients that land whole on an owner.
        """

    def on_staged(self, group: str, direction: str, num_bytes: int, seconds: float) -> None:
        """The storage of a shard that rests elsewhere was asked to move it, and so long it took.

        ``direction`` is ``"fetch"`` (the shard comes, before a gather) or ``"place"`` (a reduced
        gradient goes). What a storage does beside the host ends later.
        """

    def on_broken(self) -> None:
        """An exception broke the step off: what began will not end."""
