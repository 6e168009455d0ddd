"""Several plugins around one parameter: flatten in order, unflatten in reverse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard._torch.private import local_tensor
from polyshard.errors import PluginError
from polyshard.plugins.seams import ParamInfo

Extensions = tuple[Any | None, ...]


def is_transformed(extensions: Extensions) -> bool:
    """Whether any layer took part."""
    return any(extension is not None for extension in extensions)


def name_of(param: ParamInfo | None) -> str:
    """How an error calls a parameter; FSDP1 does not say which one it is."""
    return f"'{param.fqn}'" if param is not None else "a parameter"


@dataclass(frozen=True)
class Layer:
    """One plugin's transform: its own two functions, because steps run them on gradients."""

    name: str
    """Name of the plugin."""
    label: str
    """Its name and version, as errors say it."""
    flattening: Callable[[Mapping[str, Any]], Any]
    unflattening: Callable[[Mapping[str, Any]], Any]

    def flatten(self, tensor: Tensor, param: ParamInfo | None) -> tuple[Tensor, Any | None]:
        """The tensor to shard in place of ``tensor``, and what undoing it needs; or ``None``."""
        answer = self.flattening({"tensor": tensor, "param": param})
        if answer is None:
            return tensor, None
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Tensor)):
            raise PluginError(
                f"plugin {self.label} returned a {type(answer).__name__} from "
                f"pre_flatten_transform for {name_of(param)}; return a tensor and an extension."
            )
        flat, extension = answer
        if extension is None and flat is not tensor:
            raise PluginError(
                f"plugin '{self.name}': pre_flatten_transform changed {name_of(param)} but "
                "returned no extension, so it could not be undone. Return the tensor itself "
                "to stay out, or an extension object."
            )
        return flat, extension

    def unflatten(self, tensor: Tensor, extension: Any, param: ParamInfo | None) -> Tensor:
        """Undo :meth:`flatten` on the unsharded tensor."""
        given = {"tensor": tensor, "param_extension": extension, "param": param}
        answer: Tensor | None = self.unflattening(given)
        if answer is None:
            raise PluginError(
                f"plugin {self.label} flattened {name_of(param)} but gave no answer in "
                "post_unflatten_transform; return the unflattened tensor."
            )
        return answer


class TransformStack:
    """The transforms of a group: flatten in plugin order, unflatten in reverse.

    Both run outside autograd: the outermost unflattened tensor becomes the autograd leaf, and its
    gradient is flattened again before it is reduced.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        """In plugin order: the first is nearest to the parameter as modules know it."""
        self._layers = tuple(layers)

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._layers)

    def flatten(self, tensor: Tensor, param: ParamInfo | None) -> tuple[Tensor, Extensions]:
        """Peel every layer; returns the tensor to shard and what each layer remembers.

        Raises:
            PluginError: when a layer changes the tensor but keeps nothing to undo it with.
        """
        extensions: list[Any | None] = []
        for layer in self._layers:
            tensor, extension = layer.flatten(tensor, param)
            extensions.append(extension)
        return tensor, tuple(extensions)

    def layers_of(self, extensions: Extensions) -> tuple[str, ...]:
        """Names of the layers that took part when a tensor was flattened."""
        pairs = zip(self._layers, extensions, strict=True)
        return tuple(layer.name for layer, extension in pairs if extension is not None)

    def verify(self, flat: Tensor, extensions: Extensions, param: ParamInfo, given: Tensor) -> None:
        """See that unflattening ``flat`` gives back the ``given`` parameter, without a copy.

        Raises:
            PluginError: naming the layers and the parameter.
        """
        memory = flat.contiguous()
        found = self.rebuild(memory, extensions, param)
        if _differ(found, given):
            layers = ", ".join(f"'{name}'" for name in self.layers_of(extensions))
            raise PluginError(
                f"plugins {layers}: the inverse of their transform of '{param.fqn}' {param.shape} "
                f"gives {_form(found)} that is not the parameter; post_unflatten_transform must "
                "invert pre_flatten_transform."
            )

    def rebuild(self, tensor: Tensor, extensions: Extensions, param: ParamInfo | None) -> Tensor:
        """As :meth:`unflatten`, refusing copies: they would not see what is gathered.

        Raises:
            PluginError: naming the layer and the parameter.
        """
        for layer, extension in zip(reversed(self._layers), reversed(extensions), strict=True):
            if extension is None:
                continue
            outer = layer.unflatten(tensor, extension, param)
            if not isinstance(outer, Tensor):
                raise PluginError(
                    f"plugin '{layer.name}': post_unflatten_transform returned a "
                    f"{type(outer).__name__} for {name_of(param)}; return the unflattened tensor."
                )
            if not _storages(tensor) & _storages(outer):
                raise PluginError(
                    f"plugin '{layer.name}': post_unflatten_transform returned a copy of "
                    f"{name_of(param)}. It must alias the tensor it is given, which is filled "
                    "anew at every gather: use view, transpose or narrow, not reshape, to or clone."
                )
            tensor = outer
        return tensor

    def unflatten(self, tensor: Tensor, extensions: Extensions, param: ParamInfo | None) -> Tensor:
        """Put every layer back, the last peeled first."""
        for layer, extension in zip(reversed(self._layers), reversed(extensions), strict=True):
            if extension is not None:
                tensor = layer.unflatten(tensor, extension, param)
        return tensor


def _storages(tensor: Tensor) -> set[int]:
    """Identities of all memory that ``tensor`` shows, that of a subclass's inner tensors too."""
    parts = getattr(tensor, "__tensor_flatten__", None)
    if parts is None:
        return {tensor.untyped_storage()._cdata}
    inner = (getattr(tensor, name) for name in parts()[0])
    return set().union(*(_storages(part) for part in inner if isinstance(part, Tensor)))


def _differ(found: Tensor, given: Tensor) -> bool:
    """Whether two parameters are not the same, as far as that can be seen."""
    if found.shape != given.shape:
        return True
    if isinstance(found, DTensor) and isinstance(given, DTensor):
        if found.placements != given.placements or found.device_mesh != given.device_mesh:
            return True
        found, given = local_tensor(found), local_tensor(given)
        if found.shape != given.shape:
            return True
    kinds = {type(found), type(given)} - {Tensor, torch.nn.Parameter}
    if kinds or found.is_meta or given.is_meta or found.dtype != given.dtype:
        return False
    same_memory = found.data_ptr() == given.data_ptr() and found.stride() == given.stride()
    if same_memory or torch.equal(found, given):
        return False
    return not bool(((found == given) | ((found != found) & (given != given))).all())  # noqa: PLR0124


def _form(tensor: Tensor) -> str:
    return f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}"
