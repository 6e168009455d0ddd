"""What the groups of conformance tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from polyshard.composition.roles import ROLES, Contributions
from polyshard.composition.stack import PluginStack, build_stack
from polyshard.testing.cases import Case

Factory = Callable[[], object]
ROUNDING = 1e-5
"""What the order of a sum changes, for a matrix that lies another way, say."""


def plugins_of(factory: Factory) -> list[object]:
    """What ``factory`` makes: the plugin to be judged, and after it those that it needs beside it.

    One that goes around another's part is judged with something to go around.
    """
    made = factory()
    return list(made) if isinstance(made, list | tuple) else [made]


class Kit:
    """Fixtures and comparisons. Override :meth:`factory`."""

    tolerance: float = 0.0
    """Error a lossy codec admits, relative to the largest value of a parameter."""
    loss_tolerance: float | None = None
    """How far losses may be off, relative and absolute; by default twice :attr:`tolerance`."""

    @property
    def closeness(self) -> float:
        """How far the losses of a plugin that is not exact may be off."""
        if self.loss_tolerance is not None:
            return self.loss_tolerance
        return max(2 * self.tolerance, ROUNDING)

    def is_exact(self, factory: Factory) -> bool:
        """Whether training with the plugin has to give every bit of training without."""
        return self.tolerance == 0.0 and not build_stack(plugins_of(factory)).onion

    @pytest.fixture
    def factory(self) -> Factory:
        """A module-level callable that makes the plugin."""
        raise NotImplementedError(
            f"{type(self).__name__} must override the fixture 'factory' and return a callable "
            "that makes the plugin"
        )

    @pytest.fixture
    def stack(self, factory: Factory) -> PluginStack:
        """The plugin alone."""
        return build_stack(plugins_of(factory))

    def contributions(self, stack: PluginStack, at: Case) -> Contributions:
        """What the plugin adds to a standard group."""
        return stack.contributions(at.info)

    def skip_unless_claimed(self, part: Any, what: str) -> None:
        """Skip where the engine's own part answered."""
        if part is None or type(part) in {role.engine for role in ROLES}:
            pytest.skip(f"the plugin takes no {what}")

    def assert_close(self, found: Tensor, expected: Tensor) -> None:
        """Equal within :attr:`tolerance` of the largest expected value."""
        assert found.shape == expected.shape
        if expected.numel():
            error = (found - expected).abs().max()
            assert bool(error <= self.tolerance * expected.abs().max()), float(error)
