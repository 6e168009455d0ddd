"""Every error that users can meet.

Messages name the rank or plugin, the problem, its place and the fix. Classes derive from those that
torch raises in the same situation, so that code which catches torch's types keeps working.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable


class PolyshardError(Exception):
    """Base of all errors raised on purpose."""


class ModuleError(PolyshardError, ValueError):
    """A module or parameter that cannot be sharded as asked."""


class AlreadyShardedError(ModuleError, AssertionError):
    """``fully_shard`` was applied to one module twice (torch raises ``AssertionError`` here)."""


class DeepcopyError(PolyshardError, AssertionError, TypeError):
    """A sharded module was deep-copied (torch raises ``AssertionError`` here)."""


class MeshError(PolyshardError, ValueError):
    """A device mesh that does not fit the processes or the request."""


class UnnamedMeshError(MeshError, AssertionError):
    """A 2-D mesh whose axes have no names (torch raises ``AssertionError`` here)."""


class ProtocolError(ModuleError, AssertionError):
    """A tensor class with half of FSDP2's protocol (torch raises ``AssertionError`` here)."""


class SettingError(PolyshardError, ValueError, TypeError):
    """A keyword or setter received an invalid value."""


class ShardDimError(SettingError, AssertionError):
    """A dim to shard that a parameter does not have (torch raises ``AssertionError`` here)."""


class CustomCommsError(SettingError, AssertionError):
    """What custom transfers rule out, or what rules them out.

    An allocation setting beside them (torch raises ``AssertionError`` here), or a plugin that moves
    gradients by itself.
    """


class UnsupportedError(PolyshardError, ValueError, NotImplementedError):
    """A feature that this version does not support; the message names an alternative."""


class PlanMismatchError(PolyshardError, ValueError):
    """Ranks planned different things; raised on every rank before the first collective."""

    told: tuple[int, ...] = ()
    """The ranks that raise the same error."""


class GradientMismatchError(PolyshardError, ValueError, RuntimeError):
    """Ranks have gradients of different parameters; raised on every rank before any sum is used."""


class LifecycleError(PolyshardError, RuntimeError):
    """A call in a state that does not permit it (forward on meta, reset on a non-root, ...)."""


class PeerError(PolyshardError, RuntimeError):
    """A transfer failed because another rank did; the message quotes that rank."""


class ControlFlowError(PeerError):
    """Ranks wait for each other at different places; the message lists the place of each rank."""


class OutOfStepError(PeerError):
    """Ranks have begun different numbers of collectives in a group that cannot be rebuilt."""


class ConnectionLostError(PolyshardError, RuntimeError):
    """A transfer ended before it was complete; ranks raise a :class:`PeerError` from it."""

    peer: int | None = None
    """The rank it was to come from or go to, if known."""


class NonFiniteError(PolyshardError, RuntimeError):
    """Gradients, or their norm, that are infinite or no numbers (torch raises ``RuntimeError``)."""


class CheckpointError(PolyshardError, ValueError):
    """A checkpoint that cannot be read safely, or does not fit the model."""


class PluginError(PolyshardError, ValueError):
    """A plugin that cannot be loaded, registered or combined."""


class ConflictError(PluginError):
    """Plugins of one stack that exclude each other."""


class IneffectiveSettingWarning(UserWarning):
    """A setting without effect in this place; ``describe()`` lists it too."""


class DifferentValuesWarning(UserWarning):
    """Ranks have different values of something that should be equal; every rank warns."""


class UntiedWarning(UserWarning):
    """A module keeps a parameter that was shared with one that is sharded now."""


class UntestedVersionWarning(UserWarning):
    """A torch newer than any that polyshard was tested with."""


def warn(notices: Iterable[str]) -> None:
    """Issue each warning once (by Python's filter of repeated warnings)."""
    for notice in notices:
        warnings.warn(notice, IneffectiveSettingWarning, stacklevel=2)


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Call each of ``calls``, whatever another one raises.

    Raises:
        Exception: the first one raised, with notes of the others.
    """
    errors: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    for other in errors[1:]:
        errors[0].add_note(f"and then: {other!r} ({'; '.join(getattr(other, '__notes__', ()))})")
    if errors:
        raise errors[0]
