"""What is left where a gradient was that a step in backward has used."""

from __future__ import annotations

from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from typing_extensions import override

from polyshard_offload._torch_private import shell
from polyshard_offload.errors import OffloadError

MESSAGE = (
    "this gradient is gone: with Offload(step_in_backward=True) the optimizer used it as soon as "
    "it was reduced. Clipping, GradScaler, reading or adding up gradients after backward need "
    "step_in_backward=False. To add up micro-batches, run all but the last within no_sync() or "
    "set_is_last_backward(False), and call optimizer.zero_grad() after every step. "
    "offload.grad_norm() knows the norm."
)


class SpentGradient(Tensor):
    """Stands at ``.grad``, with the shape and dtype of a gradient and no memory.

    Code that computes with it meets an error: clipping, and a scaler that looks for infinities,
    would skip an absent gradient in silence.
    """

    @staticmethod
    def __new__(cls, parameter: Tensor) -> Self:
        """A stand-in for the gradient of ``parameter``; plain also where that is a ``DTensor``."""
        made = shell(cls, parameter)
        assert isinstance(made, cls)
        return made

    @override
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise OffloadError(MESSAGE)

    @property
    def _local_tensor(self) -> Tensor:
        raise OffloadError(MESSAGE)

    def full_tensor(self) -> Tensor:
        """Refuse, as everything that computes with it.

        Raises:
            OffloadError: saying what to do instead.
        """
        raise OffloadError(MESSAGE)

    to_local = full_tensor

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SpentGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def spend(parameter: Tensor) -> None:
    """Free the gradient of ``parameter``, and leave a :class:`SpentGradient`."""
    with torch.no_grad():
        parameter.grad = SpentGradient(parameter)
