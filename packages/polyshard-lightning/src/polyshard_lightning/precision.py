"""Lightning's precision plugins, clipping sharded gradients by their norm over all ranks."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer
from typing_extensions import override

from polyshard import clip_grad_norm_
from polyshard.errors import UnsupportedError

__all__ = ["Clipping", "clipping"]


class Clipping(Precision):
    """Mixed into the class of the plugin that Lightning chose."""

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """As ``torch.nn.utils.clip_grad_norm_``, whatever meshes the parameters are on."""
        clip_grad_norm_(self.main_params(optimizer), float(clip_val))


def clipping(plugin: Precision) -> Precision:
    """The same plugin, which clips so; its state stays, and the name that is saved under.

    Raises:
        UnsupportedError: for a plugin that scales losses (``16-mixed``).
    """
    if getattr(plugin, "scaler", None) is not None:
        raise UnsupportedError(
            f"PolyshardStrategy: {type(plugin).__name__}({plugin.precision!r}) scales losses, and "
            "finds overflows on each rank for itself, so that ranks would skip different steps. "
            "Use precision='bf16-mixed', or 'bf16-true'."
        )
    if not isinstance(plugin, Clipping):
        original: Any = type(plugin)
        own = {"__qualname__": original.__qualname__, "__module__": original.__module__}
        plugin.__class__ = type(original.__name__, (Clipping, original), own)
    return plugin
