"""Several plugins around one parameter: flatten in order, unflatten in reverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from polyshard.errors import PluginError
from polyshard.seams import ParameterTransform, ParamInfo

Extensions = tuple[Any | None, ...]


def name_of(param: ParamInfo | None) -> str:
    """How an error calls a parameter; FSDP1 does not say which one it is."""
    return f"'{param.fqn}'" if param is not None else "a parameter"


class Onion:
    """The transforms of a group. Each gets back the extension it returned."""

    def __init__(self, transforms: Sequence[ParameterTransform]) -> None:
        """In plugin order: the first is nearest to the parameter as modules know it."""
        self._transforms = tuple(transforms)

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._transforms)

    def flatten(self, tensor: Tensor, param: ParamInfo | None) -> tuple[Tensor, Extensions]:
        """Peel every layer; returns the tensor to shard and what each layer remembers.

        Raises:
            PluginError: when a layer changes the tensor but keeps nothing to undo it with.
        """
        extensions: list[Any | None] = []
        for layer in self._transforms:
            flat, extension = layer.flatten(tensor, param)
            if extension is None and flat is not tensor:
                raise PluginError(
                    f"plugin '{layer.name}': pre_flatten_transform changed {name_of(param)} but "
                    "returned no extension, so it could not be undone. Return the tensor itself "
                    "to stay out, or an extension object."
                )
            tensor = flat
            extensions.append(extension)
        return tensor, tuple(extensions)

    def layers_of(self, extensions: Extensions) -> tuple[str, ...]:
        """Names of the layers that took part when a tensor was flattened."""
        pairs = zip(self._transforms, extensions, strict=True)
        return tuple(layer.name for layer, extension in pairs if extension is not None)

    def unflatten(self, tensor: Tensor, extensions: Extensions, param: ParamInfo | None) -> Tensor:
        """Put every layer back, the last peeled first."""
        for layer, extension in zip(reversed(self._transforms), reversed(extensions), strict=True):
            if extension is not None:
                tensor = layer.unflatten(tensor, extension, param)
        return tensor
