"""The kit passes sound plugins and fails unsound ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from toy_codecs import Codecs

from polyshard_testing import PluginConformance
from polyshard_testing.runs import (
    Factory,
    bytes_of_tensors,
    equal_states,
    shapes_of_states,
    tensors_in,
)


class TestCodecs(PluginConformance):
    @pytest.fixture
    def factory(self) -> Factory:
        return Codecs


def test_forgetting_the_fixture_says_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from polyshard_testing import PluginConformance

        class TestForgetful(PluginConformance):
            pass
        """
    )
    result = pytester.runpytest("-k", "clean", "-p", "polyshard_testing.fixtures")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*TestForgetful must override the fixture 'factory'*"])


def test_states_may_have_lists_and_arrays() -> None:
    """Checkpoints save them, so the kit compares and counts them."""
    one, other = torch.ones(2, device="cpu"), torch.zeros(2, device="cpu")
    assert equal_states({"a": [one]}, {"a": [one.clone()]})
    assert not equal_states({"a": [one]}, {"a": [other]})
    assert not equal_states([one], [one, one])
    assert equal_states((one.numpy(), 3), (one.numpy(), 3))
    assert not equal_states(one.numpy(), other.numpy())
    assert list(map(id, tensors_in({"a": [one, {"b": (other,)}]}))) == [id(one), id(other)]
    assert shapes_of_states({"a": [one]}) != shapes_of_states({"a": [one, one]})


def test_what_torch_compiled_before_counts_as_no_memory() -> None:
    before = bytes_of_tensors()
    kept = torch.ones(3)
    symbolic: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(kept, symbolic_context=symbolic)
    assert not isinstance(fake.untyped_storage().nbytes(), int)
    found = bytes_of_tensors()
    assert type(found) is int
    assert found == before + 12
