"""What plugins add to single parameters: constraints, forms in checkpoints, transforms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from torch import Tensor

from polyshard.seams.base import Named
from polyshard.seams.info import ParamInfo


class ShardingConstraint(Named, ABC):
    """Says which elements of a parameter must not be separated."""

    @abstractmethod
    def block_elements(self, param: ParamInfo) -> int:
        """Contiguous elements that must stay on one rank; 1 when anything goes."""


class StateDictAdapter(Named, ABC):
    """Keeps checkpoints native when a plugin changes what a parameter looks like."""

    @abstractmethod
    def on_save(self, param: ParamInfo, value: Any) -> Any:
        """The value to store under the parameter's original name."""

    @abstractmethod
    def on_load(self, param: ParamInfo, value: Any) -> Any:
        """The value to load into the parameter."""

    def on_save_state(self, param: ParamInfo, name: str, value: Any) -> Any:
        """The value to store for optimizer state ``name`` of the parameter's shape.

        Right as it is for an adapter that moves elements. One that changes values overrides this
        and :meth:`on_load_state`; else its state is saved as the plugin sees it, with a warning.
        """
        del name
        return self.on_save(param, value)

    def on_load_state(self, param: ParamInfo, name: str, value: Any) -> Any:
        """The value to load into optimizer state ``name``."""
        del name
        return self.on_load(param, value)


class ParameterTransform(Protocol):
    """One layer of the onion around a parameter (see ``pre_flatten_transform`` in the hookspecs).

    The engine makes these of a plugin's two hooks, so plugins never write one. Flattening runs in
    plugin order, unflattening in reverse. Both run outside autograd: the outermost unflattened
    tensor becomes the autograd leaf, and its gradient is flattened again before it is reduced.
    """

    @property
    def name(self) -> str:
        """Name of the plugin."""
        ...

    def flatten(self, tensor: Tensor, param: ParamInfo | None) -> tuple[Tensor, Any | None]:
        """The tensor to shard in place of ``tensor``, and what :meth:`unflatten` will need.

        ``None`` as the second answer says "not mine": the tensor must come back unchanged.
        """
        ...

    def unflatten(self, tensor: Tensor, param_extension: Any, param: ParamInfo | None) -> Tensor:
        """Undo :meth:`flatten` on the unsharded tensor. The result must alias ``tensor``."""
        ...
