"""Several plugins around one parameter: flatten in order, unflatten in reverse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyshard._torch.private import local_tensor
from polyshard.errors import PluginError
from polyshard.plugins.member import Member
from polyshard.plugins.seams import ParamInfo
from polyshard.sharding.rows import is_local_part

FLATTEN, UNFLATTEN = "pre_flatten_transform", "post_unflatten_transform"
Extensions = tuple[Any | None, ...]


def is_transformed(extensions: Extensions) -> bool:
    """Whether any plugin took part."""
    return any(extension is not None for extension in extensions)


def name_of(param: ParamInfo | None) -> str:
    """How an error calls a parameter; FSDP1 does not say which one it is."""
    return f"'{param.fqn}'" if param is not None else "a parameter"


class TransformStack:
    """The transforms of a stack: flatten in plugin order, unflatten in reverse.

    Both run outside autograd: the outermost unflattened tensor becomes the autograd leaf, and its
    gradient is flattened again before it is reduced.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        """In plugin order: the first is nearest to the parameter as modules know it."""
        self._members = tuple(member for member in members if FLATTEN in member.hooks)

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._members)

    def flatten(self, tensor: Tensor, param: ParamInfo | None) -> tuple[Tensor, Extensions]:
        """Return the tensor to shard, and what each plugin needs to undo its transform."""
        extensions: list[Any | None] = []
        for member in self._members:
            answer = member.call(FLATTEN, {"tensor": tensor, "param": param})
            match (tensor, None) if answer is None else answer:
                case (Tensor() as flat, extension) if extension is not None or flat is tensor:
                    tensor = flat
                    extensions.append(extension)
                case (Tensor(), None):
                    raise PluginError(
                        f"plugin {member.label}: {FLATTEN} changed {name_of(param)} but returned "
                        "no extension, so it could not be undone. Return the tensor itself to stay "
                        "out, or an extension object."
                    )
                case _:
                    raise PluginError(
                        f"plugin {member.label}: {FLATTEN} returned a {type(answer).__name__} for "
                        f"{name_of(param)}; return a tensor and an extension."
                    )
        return tensor, tuple(extensions)

    def unflatten(self, tensor: Tensor, extensions: Extensions, param: ParamInfo | None) -> Tensor:
        """Undo :meth:`flatten` on the unsharded tensor, the last transform first."""
        for member, extension in reversed(list(self._taking_part(extensions))):
            given = {"tensor": tensor, "param_extension": extension, "param": param}
            outer, problem = member.call(UNFLATTEN, given), ""
            if not isinstance(outer, Tensor):
                found = "no answer" if outer is None else f"a {type(outer).__name__}"
                problem = f"returned {found} for {name_of(param)}; return the unflattened tensor."
            elif not _storages(tensor) & _storages(outer):
                problem = (
                    f"returned a copy of {name_of(param)}. It must alias the tensor it is given, "
                    "which is filled anew at every gather: use view, transpose or narrow, not "
                    "reshape, to or clone."
                )
            if problem:
                raise PluginError(f"plugin {member.label}: {UNFLATTEN} {problem}")
            tensor = outer
        return tensor

    def layers_of(self, extensions: Extensions) -> tuple[str, ...]:
        """Names of the plugins that took part when a tensor was flattened."""
        return tuple(member.name for member, _ in self._taking_part(extensions))

    def _taking_part(self, extensions: Extensions) -> Iterator[tuple[Member, Any]]:
        pairs = zip(self._members, extensions, strict=True)
        return (pair for pair in pairs if pair[1] is not None)

    def verify(self, flat: Tensor, extensions: Extensions, param: ParamInfo, given: Tensor) -> None:
        """Refuse transforms that do not give back the ``given`` parameter from ``flat``."""
        found = self.unflatten(flat.contiguous(), extensions, param)
        if _differ(found, given):
            layers = ", ".join(f"'{name}'" for name in self.layers_of(extensions))
            raise PluginError(
                f"plugins {layers}: the inverse of their transform of '{param.fqn}' {param.shape} "
                f"gives a {type(found).__name__} of shape {tuple(found.shape)} that is not the "
                f"parameter; {UNFLATTEN} must invert {FLATTEN}."
            )


def _storages(tensor: Tensor) -> set[int]:
    """Identities of all memory that ``tensor`` shows, that of a subclass's inner tensors too."""
    parts = getattr(tensor, "__tensor_flatten__", None)
    if parts is None:
        return {tensor.untyped_storage()._cdata}
    inner = (getattr(tensor, name) for name in parts()[0])
    return set().union(*(_storages(part) for part in inner if isinstance(part, Tensor)))


def _differ(found: Tensor, given: Tensor) -> bool:
    """Whether two parameters are not the same, as far as that can be seen."""
    if isinstance(found, DTensor) and isinstance(given, DTensor):
        pair = (found, given)
        one, other = ((t.shape, t.placements, t.device_mesh) for t in pair)
        if one != other:
            return True
        found, given = map(local_tensor, pair)
    if found.shape != given.shape:
        return True
    kinds = {type(found), type(given)} - {Tensor, torch.nn.Parameter}
    if kinds or found.is_meta or given.is_meta or found.dtype != given.dtype:
        return False
    if is_local_part(found, given) or torch.equal(found, given):
        return False
    return not bool(((found == given) | ((found != found) & (given != given))).all())  # noqa: PLR0124
