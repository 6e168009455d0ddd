"""Several transforms around one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from toy_transforms import Flattening, Transposing, Unsqueezing

from polyshard import Plugin, hookimpl
from polyshard.errors import PluginError
from polyshard.plugins.seams import ParamInfo
from polyshard.plugins.stack import build_stack

PARAM = ParamInfo("w", (2, 3), torch.float32, True, None, nn.Linear)  # type: ignore[arg-type]


class Permuting(Plugin):
    """Permutes the dims and hands out an extension that only it can know."""

    def __init__(self, name: str, dims: tuple[int, ...] | None) -> None:
        self.name = name  # type: ignore[misc]
        self.dims = dims

    @hookimpl
    def pre_flatten_transform(self, tensor: Tensor) -> Any:
        return None if self.dims is None else (tensor.permute(self.dims), (self.name, self.dims))

    @hookimpl
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        owner, order = param_extension
        assert owner == self.name, "an extension went to another plugin"
        return tensor.permute(sorted(range(len(order)), key=order.__getitem__))


layers = st.lists(st.none() | st.permutations(range(3)).map(tuple), max_size=6)


@given(layers)
def test_what_is_peeled_is_put_back(dims: Sequence[tuple[int, ...] | None]) -> None:
    transforms = build_stack([Permuting(str(i), d) for i, d in enumerate(dims)]).transforms
    value = torch.arange(24.0).view(2, 3, 4)
    flat, extensions = transforms.flatten(value, PARAM)
    assert [e is None for e in extensions] == [d is None for d in dims]
    back = transforms.unflatten(flat, extensions, PARAM)
    assert torch.equal(back, value)
    assert back.data_ptr() == value.data_ptr(), "without a copy"


def test_an_empty_stack_is_false_and_does_nothing() -> None:
    transforms = build_stack([]).transforms
    value = torch.ones(2)
    assert not transforms
    assert transforms.flatten(value, PARAM) == (value, ())
    assert transforms.unflatten(value, (), PARAM) is value


@given(st.permutations(range(3)))
def test_layers_are_in_plugin_order_however_they_are_passed(places: Sequence[int]) -> None:
    plugins = [Flattening(), Transposing(before=["flattening"]), Unsqueezing()]
    transforms = build_stack([plugins[i] for i in places]).transforms
    flat, extensions = transforms.flatten(torch.arange(6.0).view(2, 3), PARAM)
    assert flat.tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    # By name where nothing is declared; unsqueezing meets a vector and stays out.
    assert extensions == ("transposed", (3, 2), None)


def plugin(returned: Any, undone: Any = None) -> Plugin:
    class Odd(Plugin):
        name = "odd"

        @hookimpl
        def pre_flatten_transform(self, tensor: Tensor) -> Any:
            return returned(tensor)

        @hookimpl
        def post_unflatten_transform(self, tensor: Tensor) -> Any:
            return undone

    return Odd()


@pytest.mark.parametrize(
    "returned",
    [lambda t: t, lambda t: (t,), lambda t: ("w", 1)],
    ids=["tensor", "short", "text"],
)
def test_an_answer_is_a_tensor_and_an_extension(returned: Any) -> None:
    transforms = build_stack([plugin(returned)]).transforms
    with pytest.raises(PluginError, match=r"'odd' \(0\): .* a .* for 'w'; return a tensor and"):
        transforms.flatten(torch.ones(2), PARAM)


def test_a_changed_tensor_needs_an_extension() -> None:
    transforms = build_stack([plugin(lambda t: (t.clone(), None))]).transforms
    with pytest.raises(PluginError, match=r"'odd' \(0\): pre_flatten_transform changed 'w'"):
        transforms.flatten(torch.ones(2), PARAM)
    with pytest.raises(PluginError, match="changed a parameter"):
        transforms.flatten(torch.ones(2), None)


def test_a_layer_must_answer_for_what_it_flattened() -> None:
    transforms = build_stack([plugin(lambda t: (t, 1))]).transforms
    flat, extensions = transforms.flatten(torch.ones(2), PARAM)
    with pytest.raises(PluginError, match="post_unflatten_transform returned no answer for 'w'"):
        transforms.unflatten(flat, extensions, PARAM)
