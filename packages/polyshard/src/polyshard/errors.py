"""Every error a user can meet, with the message formats in one place.

Messages say who, what, where and how to fix it. Classes derive from what torch raises in the same
place, so that callers who match on torch's type keep working.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable


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
    """A keyword or setter received a value it does not take."""


class ShardDimError(SettingError, AssertionError):
    """A dim to shard that a parameter does not have (torch raises ``AssertionError`` here)."""


class CustomCommsError(SettingError, AssertionError):
    """Memory for transfers that are the user's own (torch raises ``AssertionError`` here)."""


class UnsupportedError(PolyshardError, ValueError, NotImplementedError):
    """Something FSDP can mean but this version does not do; the message says what to do instead."""


class PlanMismatchError(PolyshardError, ValueError):
    """Ranks planned different things; raised on every rank before the first collective."""

    told: tuple[int, ...] = ()
    """The ranks that raise it alike."""


class GradientMismatchError(PolyshardError, ValueError, RuntimeError):
    """Ranks have gradients of different parameters; raised on every rank before any sum is kept."""


class LifecycleError(PolyshardError, RuntimeError):
    """A call at a moment when it cannot work (forward on meta, reset on a non-root, ...)."""


class PeerError(PolyshardError, RuntimeError):
    """A transfer failed because another rank did; the message quotes that rank."""


class ControlFlowError(PeerError):
    """Ranks wait for each other at different places; the message says where each of them is."""


class OutOfStepError(PeerError):
    """Ranks have begun different numbers of collectives in a group that cannot be made anew."""


class ConnectionLostError(PolyshardError, RuntimeError):
    """A transfer ended before it was complete; what ranks see is the :class:`PeerError` of it."""

    peer: int | None = None
    """The rank it was to come from or go to, if known."""


class NonFiniteError(PolyshardError, RuntimeError):
    """Gradients, or their norm, that are infinite or no numbers (torch raises ``RuntimeError``)."""


class CheckpointError(PolyshardError, ValueError):
    """A checkpoint that cannot be read safely, or does not mean what it is loaded for."""


class PluginError(PolyshardError, ValueError):
    """A plugin that cannot be loaded, registered or combined."""


class ConflictError(PluginError):
    """Plugins of one stack that exclude each other."""


class IneffectiveSettingWarning(UserWarning):
    """A setting that changes nothing where it was given; ``describe()`` says so as well."""


class DifferentValuesWarning(UserWarning):
    """Ranks were given different values of what should be alike; every rank is told."""


class UntiedWarning(UserWarning):
    """A module keeps a parameter that was shared with one that is sharded now."""


class UntestedVersionWarning(UserWarning):
    """A torch newer than any that polyshard was tested with."""


def warn(notices: Iterable[str]) -> None:
    """Say each once (by Python's filter of repeated warnings)."""
    for notice in notices:
        warnings.warn(notice, IneffectiveSettingWarning, stacklevel=2)
