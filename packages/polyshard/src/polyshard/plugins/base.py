"""What all seams share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

P = TypeVar("P")


class Named:
    """Anything that shows up in a plan.

    A subclass says each as a class attribute, an attribute that it sets, or a property.
    """

    # To mypy these are read-only, so that all three may override them; at run time they are plain
    # attributes, so that an instance can set its own.
    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """Short public name, as in error messages and ``describe()``."""
            raise NotImplementedError

        @property
        def settings(self) -> str:
            """All settings that change results or sizes, as text; compared across ranks."""
            raise NotImplementedError

        @property
        def notices(self) -> tuple[str, ...]:
            """What ``describe()`` says of the group; read after it was bound."""
            raise NotImplementedError

    else:
        name: str
        settings: str = ""
        notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Around(Generic[P]):
    """An answer to an exclusive hook that is no claim, but goes around whoever has the role.

    Wrappers nest in plugin order, the first outermost, around what another plugin claims or else
    around the engine's own part. Plans show the nesting, and ranks compare it.

    Attributes:
        make: gives the part that is used in place of the one it is given, for one group. It raises
            :class:`polyshard.errors.PluginError` where it cannot go around that, and returns the
            very part that it was given to stay out.
    """

    make: Callable[[P], P]


@runtime_checkable
class Stateful(Protocol):
    """What a checkpoint can hold, as ``torch.distributed.checkpoint`` calls it as well."""

    def state_dict(self) -> dict[str, Any]:
        """What to save: plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was saved."""
        ...


@runtime_checkable
class Undoable(Protocol):
    """An optimizer that keeps more than ``optimizer.state`` shows, for ``polyshard.attempt``.

    An attempt that failed writes parameters, state and settings of its optimizers back to what they
    were. What a plugin keeps of a model is put back through ``polyshard_plugin_state``.
    """

    @property
    def polyshard_steps_early(self) -> bool:
        """Whether parameters change before ``step()`` is called: in backward."""
        ...

    def polyshard_undo(self) -> None:
        """Let go of a step that failed.

        After this, values are written back into parameters, and ``optimizer.state`` gets new
        tensors, with the values that those in it had.
        """
        ...


def overrides(method: Callable[..., Any], default: Callable[..., Any]) -> bool:
    """Whether ``method``, looked up on an object, is its own and not the ``default`` of its base.

    For plan time: what a step needs of it is kept as a plain attribute.
    """
    return (method.__func__ if inspect.ismethod(method) else method) is not default
