"""The plugin: settings, and the codecs it gives to each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from polyshard import Plugin, hookimpl
from polyshard.description import identities_of
from polyshard.errors import SettingError
from polyshard.plugins.seams import GroupIdentity, GroupInfo
from polyshard_quantized.__about__ import __version__
from polyshard_quantized.formats.base import BlockFormat
from polyshard_quantized.formats.int8 import Int8Block
from polyshard_quantized.layout.exclusions import Exclusions
from polyshard_quantized.report import GroupReport, Report
from polyshard_quantized.roundtrip import relative_errors
from polyshard_quantized.transfers.feedback import ErrorFeedback
from polyshard_quantized.transfers.gather import QuantizedGather
from polyshard_quantized.transfers.reduction import GradientSettings, QuantizedReduce, RoundingName
from polyshard_quantized.transfers.state import ReductionState
from polyshard_quantized.workspace import Workspace


class _Served:
    """The codecs given out so far, by the group each belongs to and as long as there is one."""

    def __init__(self) -> None:
        self.gathers: WeakKeyDictionary[GroupIdentity, QuantizedGather] = WeakKeyDictionary()
        self.reduces: WeakKeyDictionary[GroupIdentity, QuantizedReduce] = WeakKeyDictionary()
        self.workspace = Workspace()

    def groups(self) -> list[GroupIdentity]:
        """The groups that were given a codec, in the order they were made."""
        return list({identity: None for d in (self.gathers, self.reduces) for identity in d})


@dataclass(frozen=True, eq=False)
class QuantizedComm(Plugin):
    """Quantized all-gathers of parameters and quantized reductions of gradients.

    Attributes:
        weights: format of parameters in the all-gather; ``None`` leaves it to the engine.
        gradients: format of gradients in the reduction; ``None`` leaves it to the engine.
        exclude: parameters that travel in their own dtype, in both directions.
        rounding: of gradients: ``"nearest"``, or ``"stochastic"`` (integer formats only), which is
            right on average and costs ten times as much on a CPU.
        seed: of stochastic rounding; equal seeds give equal results.
        error_feedback: adds what one reduction left out to the next; for ``Int4Block``.
        hierarchical: on a mesh with replicas, quantize the sums between them too where that sends
            less than an all-reduce.

    Raises:
        SettingError: for settings that contradict each other or change nothing.
    """

    name = "quantized"
    version = __version__
    provides = ("gather-codec", "reduce-codec")

    weights: BlockFormat | None = field(default_factory=Int8Block)
    gradients: BlockFormat | None = None
    exclude: Exclusions = field(default_factory=Exclusions)
    rounding: RoundingName = "nearest"
    seed: int = 0
    error_feedback: ErrorFeedback | None = None
    hierarchical: bool = True
    _served: _Served = field(default_factory=_Served, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse what would be ignored."""
        for name, kind in (
            ("weights", BlockFormat),
            ("gradients", BlockFormat),
            ("error_feedback", ErrorFeedback),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise SettingError(
                    f"QuantizedComm: {name} must be a {kind.__name__} such as "
                    f"{'Int8Block(256)' if kind is BlockFormat else 'ErrorFeedback()'} or None, "
                    f"got {value!r}."
                )
        excluded: object = self.exclude
        if not isinstance(excluded, Exclusions):
            raise SettingError(f"QuantizedComm: exclude must be Exclusions(...), got {excluded!r}.")
        if self.rounding not in get_args(RoundingName):
            raise SettingError(
                f"QuantizedComm: rounding must be one of {', '.join(get_args(RoundingName))}; got "
                f"{self.rounding!r}."
            )
        self._check_effect()

    def _check_effect(self) -> None:
        if self.weights is None and self.gradients is None:
            raise SettingError(
                "QuantizedComm: weights and gradients are both None, so nothing would be "
                "quantized; give one a format, or leave the plugin out."
            )
        stochastic = self.rounding == "stochastic"
        if self.gradients is None and (stochastic or self.error_feedback is not None):
            raise SettingError(
                "QuantizedComm: rounding and error_feedback are about gradients, which stay "
                "native; pass gradients=Int8Block(), or leave them out."
            )
        if stochastic and self.gradients is not None and not self.gradients.is_integer:
            raise SettingError(
                "QuantizedComm: stochastic rounding needs a format of whole numbers; use "
                "gradients=Int8Block() or rounding='nearest'."
            )

    @hookimpl
    def polyshard_gather_codec(self, group: GroupInfo) -> QuantizedGather | None:
        """A gather codec of its own for every group, unless weights stay native."""
        if self.weights is None:
            return None
        served = self._served
        codec = QuantizedGather(self.weights, self.exclude, served.workspace)
        served.gathers[group.identity] = codec
        return codec

    @hookimpl
    def polyshard_reduce_codec(self, group: GroupInfo) -> QuantizedReduce | None:
        """A reduce codec of its own for every group, unless gradients stay native."""
        if self.gradients is None:
            return None
        settings = GradientSettings(
            self.gradients, self.rounding, self.seed, self.error_feedback, self.hierarchical
        )
        served = self._served
        codec = QuantizedReduce(settings, self.exclude, served.workspace)
        served.reduces[group.identity] = codec
        return codec

    @hookimpl
    def polyshard_plugin_state(self, group: GroupInfo) -> ReductionState | None:
        """Errors and counts of reductions, where results depend on them."""
        counts = self.error_feedback is not None or self.rounding == "stochastic"
        codec = self._served.reduces.get(group.identity)
        return codec.state if codec is not None and counts else None

    # Reports ----------------------------------------------------------------------------------

    def report(self) -> Report:
        """What was decided for every group this object serves, and the bytes of each transfer.

        Complete once plans exist: after ``polyshard.describe(model)`` or the first forward.
        """
        served = self._served
        groups: list[GroupReport] = []
        for identity in served.groups():
            codecs = (served.gathers.get(identity), served.reduces.get(identity))
            gather, reduce = (codec.report if codec is not None else None for codec in codecs)
            known = gather if gather is not None else reduce
            if known is not None:
                groups.append(GroupReport(known.group, gather, reduce))
        transfers = [t for g in groups for t in (g.gather, g.reduce) if t is not None]
        fqns = {p.fqn for transfer in transfers for p in transfer.parameters}
        unused = tuple(p for p in self.exclude.fqns if not any(fnmatchcase(fqn, p) for fqn in fqns))
        return Report(tuple(groups), unused)

    def relative_errors(self, model: nn.Module) -> dict[str, float]:
        """The error of every quantized parameter of ``model``, relative to its 2-norm.

        A collective: every rank calls it with the outermost sharded module, between steps.
        """
        if self.weights is None:
            return {}
        own = identities_of(model)
        served = {
            p.fqn: codec.format
            for identity, codec in self._served.gathers.items()
            if codec.report is not None and identity in own
            for p in codec.report.parameters
            if p.excluded is None
        }
        return relative_errors(model, served)

    # Checkpoints ------------------------------------------------------------------------------

    def state_dict(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Errors and counts of reductions: what a resumed run needs to be as one without a stop.

        Parameters are not part of it: checkpoints hold them natively, with or without the plugin.
        Keys begin with the rank, because every rank has errors of its own.

        Args:
            model: whose groups; may be left out while this object serves one model.

        Raises:
            SettingError: when groups of several models would be saved under one name.
        """
        return {key: codec.state.state_dict() for key, codec in self._reduces_of(model).items()}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], model: nn.Module | None = None
    ) -> None:
        """Continue from :meth:`state_dict`, after plans exist (``polyshard.describe(model)``).

        Args:
            state_dict: what was saved.
            model: as in :meth:`state_dict`.

        Raises:
            SettingError: when state of a group is missing, or belongs to another world size.
        """
        for key, codec in self._reduces_of(model).items():
            if key not in state_dict:
                raise SettingError(
                    f"quantized: the state dict has no '{key}', only {sorted(state_dict)}. Call "
                    "polyshard.describe(model) first, so that groups have their names, and load "
                    "the state that the same rank of the same model saved."
                )
            codec.state.load_state_dict(state_dict[key])

    def _reduces_of(self, model: nn.Module | None) -> dict[str, QuantizedReduce]:
        """The reduce codecs, by the key that a state dict has for each."""
        own = None if model is None else identities_of(model)
        found: dict[str, QuantizedReduce] = {}
        for identity, codec in self._served.reduces.items():
            if own is not None and identity not in own:
                continue
            key = f"rank{_rank()}.{codec.state.group}"
            if key in found:
                raise SettingError(
                    f"quantized: this object serves several models that have a group "
                    f"'{codec.state.group}'. Say whose state is meant: state_dict(model) and "
                    "load_state_dict(state, model), or give each model an object of its own."
                )
            found[key] = codec
        return found


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
