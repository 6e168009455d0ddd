"""Parameters whose state a plugin keeps: what is asked about them, and what is lent of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor


@dataclass(eq=False)
class Lent:
    """A parameter that is stepped now, with state that is in memory for as long as that takes.

    ``key`` is the parameter, or what stands for it, with its gradient. ``state`` is what the step
    starts from. When it has ended and ``is_settled``, the tensors of ``state`` hold the results; if
    not, ``state`` is what it left, of which some is elsewhere.
    """

    key: Tensor
    group: int
    state: dict[str, Any] = field(default_factory=dict)
    is_settled: bool = False


class OptimizerKeeper(ABC):
    """Keeps optimizer state elsewhere between steps: a plugin's part in the steps of one optimizer.

    It makes the step: ``twins.begin()`` of the :class:`Stepper`, ``lend()`` for parameters with
    their state, as many at a time as it likes, ``step_runs()`` for all others, ``twins.end()``.
    """

    error: ClassVar[type[Exception]]
    """Raised for an optimizer that couples parameters."""
    remedy: ClassVar[str]
    """What its user can do then."""

    @abstractmethod
    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Make one step; what the optimizer's ``step(closure)`` returns."""

    @abstractmethod
    def is_lent(self, parameter: Tensor) -> bool:
        """Whether ``parameter`` is no part of ``step_runs()``."""

    @abstractmethod
    def is_pinned(self, parameter: Tensor) -> bool:
        """Whether the state of a parameter that is part of it has to stay in its memory."""
