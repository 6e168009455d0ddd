"""Tensors inside whatever a module takes and returns: containers, named tuples, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from polyshard.errors import UnsupportedError


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any, *, opens: bool = True) -> Any:
    """``tree`` with ``function`` applied to every tensor; rebuilt only where something changed.

    Args:
        function: of a tensor.
        tree: containers of tensors.
        opens: whether dataclasses are looked into.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        mapped = {k: map_tensors(function, v, opens=opens) for k, v in tree.items()}
        if all(mapped[k] is v for k, v in tree.items()):
            return tree
        return _like_dict(tree, mapped)
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(function, v, opens=opens) for v in tree]
        if isinstance(tree, PackedSequence):
            items[1] = tree.batch_sizes  # which kernels read on the host
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        if type(tree) is tuple:
            return tuple(items)
        return items if type(tree) is list else _like_sequence(tree, items)
    if opens and dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(function, tree)
    return tree


def _like_dict(original: dict[Any, Any], values: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return values
    clone = copy.copy(original)
    for key, value in values.items():
        clone[key] = value
    return clone


def _like_sequence(original: Any, items: list[Any]) -> Any:
    if hasattr(original, "_make"):
        return original._make(items)
    try:
        return type(original)(items)
    except TypeError:  # a constructor of its own
        if not isinstance(original, tuple):
            return items
        made = tuple.__new__(type(original), items)
        made.__dict__.update(getattr(original, "__dict__", {}))
        return made


def _map_dataclass(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    found = tree
    for field in dataclasses.fields(tree):
        old = getattr(tree, field.name)
        new = map_tensors(function, old)
        if new is not old:
            if found is tree:
                found = copy.copy(tree)  # replace() would compute again what a constructor computes
            object.__setattr__(found, field.name, new)  # also of frozen ones
    return found


def tensors(tree: Any) -> Iterator[Tensor]:
    """Every tensor of ``tree``, in the order :func:`map_tensors` visits them."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors(getattr(tree, field.name))


def cast_floating(dtype: torch.dtype, tree: Any) -> Any:
    """``tree`` with floating tensors in ``dtype``; others, and those already in it, untouched."""

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.dtype != dtype:
            return tensor.to(dtype)
        return tensor

    return map_tensors(cast, tree)


_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def outline(tree: Any, tensors: list[Tensor], numbers: list[float] | None = None) -> Any:
    """``tree`` without its tensors, which are appended to ``tensors``; nested tuples that compare.

    Made to be traced by ``torch.compile``, so it knows plain containers only. Numbers, which may be
    symbols there, are appended to ``numbers`` where that is given.

    Raises:
        UnsupportedError: for anything else, which could hide tensors.
    """
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return ("tensor",)
    if numbers is not None and (type(tree) is int or type(tree) is float):
        numbers.append(tree)
        return ("number",)
    if type(tree) is list or type(tree) is tuple:
        kind = "list" if type(tree) is list else "tuple"
        return (kind, tuple([outline(value, tensors, numbers) for value in tree]))
    if type(tree) is dict:
        items = [(key, outline(value, tensors, numbers)) for key, value in tree.items()]
        return ("dict", tuple(items))
    if tree is None or isinstance(tree, _CONSTANTS):
        return ("constant", tree)
    raise UnsupportedError(
        f"a {type(tree).__name__} goes in or out of a sharded module inside a compiled function. "
        "There modules exchange tensors, numbers, strings and lists, tuples and dicts of them: "
        "pass those, or compile the module itself instead of what calls it."
    )


def fill(shape: Any, tensors: Iterator[Tensor], numbers: Iterator[float]) -> Any:
    """The inverse of :func:`outline`."""
    kind = shape[0]
    if kind == "tensor":
        return next(tensors)
    if kind == "number":
        return next(numbers)
    if kind == "list":
        return [fill(value, tensors, numbers) for value in shape[1]]
    if kind == "tuple":
        return tuple([fill(value, tensors, numbers) for value in shape[1]])
    if kind == "dict":
        return {key: fill(value, tensors, numbers) for key, value in shape[1]}
    return shape[1]
