"""Of which dtypes reduced gradients are put in place; see [Note: dtypes of gradients]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class Placing:
    """The dtype of each parameter's sharded gradient; ``None`` is that of the reduction."""

    def __init__(self, dtypes: Sequence[torch.dtype | None], orig: torch.dtype) -> None:
        """``orig`` is the original dtype of the group, which gradients have unless told."""
        self._dtypes = tuple(dtypes)
        self._kinds = tuple(dict.fromkeys(self._dtypes))
        self.is_plain = self._kinds == (orig,)

    def dtype_of(self, index: int) -> torch.dtype | None:
        """Of one parameter's gradient."""
        return self._dtypes[index]

    def cast(self, total: Tensor) -> Tensor:
        """``total`` (``[shard_numel]``) in the dtype of all gradients, if they have one."""
        return total.to(self._kinds[0] or total.dtype) if len(self._kinds) == 1 else total

    def parts(
        self, total: Tensor, present: Sequence[int]
    ) -> Iterator[tuple[Tensor, Sequence[int]]]:
        """What :meth:`cast` made of a sum, in each dtype, with the parameters that have it."""
        if len(self._kinds) == 1:
            yield total, present
            return
        for dtype in self._kinds:
            indices = [i for i in present if self._dtypes[i] is dtype]
            if indices:
                yield total.to(dtype or total.dtype), indices

    def __str__(self) -> str:
        """The dtypes that differ, for people."""
        return ", ".join("any" if d is None else str(d).removeprefix("torch.") for d in self._kinds)
