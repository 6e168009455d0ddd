"""What a user asks for: patterns of module names, the style each gets, and how heads divide."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch.distributed.tensor.parallel import ParallelStyle

from polyshard.errors import SettingError

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")

Styles = Mapping[str, ParallelStyle]


@dataclass(frozen=True)
class Heads:
    """Attention whose heads are divided over the ranks of the tensor-parallel mesh.

    Attributes:
        modules: pattern of the attention modules.
        width: attribute of such a module that says how many elements a head has.
        projections: its children whose outputs are heads; each must have a whole number of heads
            for every rank.
        counts: attributes that count heads (``num_heads``), which are divided by the number of
            ranks; none where the module reshapes with ``-1``.
    """

    modules: str
    width: str = "head_dim"
    projections: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what would check and change nothing.

        Raises:
            SettingError: without projections and without counts.
        """
        if not (self.projections or self.counts):
            raise SettingError(
                f"Heads({self.modules!r}) names no projections and no counts, so there is nothing "
                "to check; name the children that make heads, or leave it out."
            )


@dataclass(frozen=True)
class Plan:
    """Patterns of module names → styles, and the attention modules among them.

    Attributes:
        styles: as for torch's ``parallelize_module``: names relative to the model, each part of
            which may hold ``*``, ``?`` and ``[...]``; ``**`` stands for any number of parts.
        heads: attention modules whose head counts are checked or adjusted.
        whole: patterns of modules inside attention that every rank is meant to hold whole: what
            they compute does not depend on which heads a rank has.
    """

    styles: Styles
    heads: tuple[Heads, ...] = field(default=())
    whole: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Freeze the styles.

        Raises:
            SettingError: for keys or values of another type.
        """
        given: Mapping[Any, Any] = dict(self.styles)
        for pattern, style in given.items():
            if not isinstance(pattern, str) or not isinstance(style, ParallelStyle):
                raise SettingError(
                    f"a plan maps names of modules to styles of torch.distributed.tensor.parallel; "
                    f"got {pattern!r}: {style!r}. Write {{'blocks.*.up': ColwiseParallel()}}."
                )
        object.__setattr__(self, "styles", MappingProxyType(dict(self.styles)))
        object.__setattr__(self, "heads", tuple(self.heads))
        whole: object = self.whole
        if isinstance(whole, str):
            raise SettingError(
                f"Plan: whole takes several patterns, got {whole!r}; pass ({whole!r},)."
            )
        object.__setattr__(self, "whole", tuple(self.whole))

    @property
    def lines(self) -> tuple[str, ...]:
        """The plan as text, one entry a line: the same for equal plans in every process."""
        styles = (f"style '{pattern}': {text_of(style)}" for pattern, style in self.styles.items())
        return (*styles, *map(str, self.heads), *(f"whole '{pattern}'" for pattern in self.whole))


def text_of(style: ParallelStyle) -> str:
    """A style with its settings, as far as it shows them."""
    return f"{type(style).__name__} {_ADDRESS.sub('', repr(style))}"


def as_plan(plan: Plan | Styles | ParallelStyle) -> Plan:
    """A plan in each of the forms users have it: ours, torch's mapping, or one style.

    Raises:
        SettingError: for anything else.
    """
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, ParallelStyle):
        return Plan({"": plan})
    if isinstance(plan, Mapping):
        return Plan(plan)
    raise SettingError(
        f"TensorParallel takes a Plan, a mapping of module names to styles, or one style; got "
        f"{type(plan).__name__}."
    )
