"""Which parameters are left alone, and why: decided from metadata alone, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from polyshard.errors import SettingError
from polyshard.plugins.seams import ParamInfo
from polyshard.sharding.layout import ParameterLayout
from polyshard_quantized.formats.base import SCALE_BYTES, BlockFormat
from polyshard_quantized.layout.blocks import RowBlocks

SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Exclusions:
    """Parameters that travel in their own dtype.

    Attributes:
        min_ndim: parameters with fewer dims are excluded: norms and biases, whose values may
            differ by orders of magnitude and which are a thousandth of a transformer's bytes.
        min_numel: parameters with fewer elements are excluded.
        fqns: patterns of names, as of :mod:`fnmatch` (``"lm_head.*"``, ``"*.router.*"``); a name
            counts from the outermost sharded module. With patterns, what is unsharded by hand
            before that module first runs or is described is not quantized: its names are not known.

    Raises:
        SettingError: for values that select nothing sensible.
    """

    min_ndim: int = 2
    min_numel: int = 4096
    fqns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what would silently exclude nothing."""
        for name in ("min_ndim", "min_numel"):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise SettingError(
                    f"Exclusions: {name} must be a whole number from 0, got {value!r}."
                )
        patterns: Any = self.fqns
        listed = isinstance(patterns, tuple | list)
        if not (listed and all(isinstance(p, str) and p for p in patterns)):
            raise SettingError(
                f"Exclusions: fqns takes several patterns, got {patterns!r}; write "
                "fqns=('lm_head.*',)."
            )
        object.__setattr__(self, "fqns", tuple(self.fqns))

    def reason(self, param: ParamInfo, placed: ParameterLayout, form: BlockFormat) -> str | None:
        """Why ``param`` is left alone; ``None`` when ``form`` serves it.

        Args:
            param: the parameter.
            placed: where it rests; its ``shape`` is what is sharded (local to other axes).
            form: how its values would be cut into blocks.
        """
        chosen = self._chosen(param, placed)
        return chosen if chosen is not None else unserved(param, placed, form)

    def _chosen(self, param: ParamInfo, placed: ParameterLayout) -> str | None:
        pattern = next((p for p in self.fqns if fnmatchcase(param.fqn, p)), None)
        if pattern is not None:
            return f"its name matches '{pattern}'"
        if len(param.shape) < self.min_ndim:
            return f"ndim {len(param.shape)} < {self.min_ndim}"
        if math.prod(param.shape) < self.min_numel:
            return f"numel {math.prod(param.shape)} < {self.min_numel}"
        return None


def unserved(param: ParamInfo, placed: ParameterLayout, form: BlockFormat) -> str | None:
    """Why no format of this kind can serve ``param``, whatever the user wants."""
    if placed.numel == 0:
        return "it has no elements"
    if param.dtype not in SERVED_DTYPES:
        return f"{param.dtype} has no quantized form"
    if placed.dim is None:
        return "it has no dims"
    row = row_elements(placed)
    blocks = RowBlocks(row, form)
    if blocks.code_bytes + SCALE_BYTES * blocks.count >= 2 * row:
        return f"rows of {row} elements: a scale for each would outweigh what 16-bit values cost"
    return None


def row_elements(placed: ParameterLayout) -> int:
    """Values that no layout separates: everything behind the sharded dim."""
    assert placed.dim is not None
    return math.prod(placed.shape[placed.dim + 1 :])
