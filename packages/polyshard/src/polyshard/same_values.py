"""A plugin that demands that all ranks start from the same values."""

from __future__ import annotations

from torch import Tensor

from polyshard.__about__ import __version__
from polyshard.engine.initial_values import checksum, in_hex
from polyshard.errors import warn
from polyshard.plugins.contract import Plugin, hookimpl
from polyshard.plugins.seams import GroupInfo, Observer, ParamInfo

ON_META = "values unknown (meta device)"


class _Unchecked(Observer):
    """Says in ``describe()`` which parameters had no values to compare."""

    def __init__(self, fqns: list[str]) -> None:
        self.notices: tuple[str, ...] = (
            f"SameValues compares nothing of {', '.join(fqns)}: on the meta device when sharded. "
            "What initialises them must give every rank the same values.",
        )


class SameValues(Plugin):
    """Refuses to train when ranks brought different values of one parameter.

    ``fully_shard`` keeps on each rank its own slice of its own values, and synchronises nothing:
    ranks that were initialised differently would train a mixture of their models. Without this
    plugin the first forward warns of that on every rank (:class:`DifferentValuesWarning`). With
    it, a checksum of every full parameter is part of the plan, so that a difference is a
    ``PlanMismatchError`` on every rank before the first transfer, naming the parameter, whatever
    is loaded in between.

    Buffers are not compared, nor are parameters that are sharded on the meta device: they have no
    values yet, which ``describe()`` says. Local parts of tensor parallelism are compared with those
    of the same tensor-parallel rank.
    """

    name = "same_values"
    version = __version__

    @hookimpl
    def polyshard_parameter_facts(self, tensor: Tensor, param: ParamInfo) -> str:
        """A checksum of the values' bits."""
        del param
        if tensor.is_meta:
            return ON_META
        return f"values {in_hex(checksum(tensor))}"

    @hookimpl
    def polyshard_observer(self, group: GroupInfo) -> Observer | None:
        """Nothing to watch, but something to say where values were not there yet."""
        unchecked = [p.fqn for p in group.parameters if ON_META in p.facts]
        if not unchecked:
            return None
        observer = _Unchecked(unchecked)
        warn(observer.notices)
        return observer
