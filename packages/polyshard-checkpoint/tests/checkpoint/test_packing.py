"""State of any form, as entries of a checkpoint."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from toy_runs import assert_equal

from polyshard.errors import CheckpointError
from polyshard_checkpoint.packing import is_packed, pack, room_for, unpack

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.lists(st.floats(-10, 10), max_size=4).map(torch.tensor)
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=10,
)


def metadata_of(entries: dict[str, Any]) -> Metadata:
    found: dict[str, Any] = {}
    for key, value in entries.items():
        if isinstance(value, torch.Tensor):
            chunk = ChunkStorageMetadata(torch.Size([0] * value.ndim), value.shape)
            properties = TensorProperties(value.dtype)
            found[key] = TensorStorageMetadata(properties, value.shape, [chunk])
        else:
            found[key] = BytesStorageMetadata()
    return Metadata(found)


@given(trees)
def test_what_is_packed_comes_back(tree: Any) -> None:
    entries = pack("key", tree)
    metadata = metadata_of(entries)
    assert is_packed("key", metadata)
    room = room_for("key", metadata)
    assert set(room) == set(entries)
    for key, value in entries.items():
        if isinstance(value, torch.Tensor):
            room[key].copy_(value)
        else:
            room[key] = value
    assert_equal(unpack("key", room), tree)


Pair = namedtuple("Pair", "a b")


def through(tree: Any) -> Any:
    return unpack("key", pack("key", tree))


def test_containers_stay_what_they_are() -> None:
    """``MultiStepLR`` counts its milestones with a ``Counter`` and asks for its methods."""
    for tree in (Counter([3, 5, 5]), OrderedDict(b=1, a=2)):
        assert type(through(tree)) is type(tree)
        assert through(tree) == tree
    assert list(through(OrderedDict(b=1, a=2))) == ["b", "a"]


@pytest.mark.parametrize("odd", [defaultdict(int, a=1), Pair(1, 2)])
def test_containers_that_would_become_others_are_refused(odd: Any) -> None:
    with pytest.raises(CheckpointError, match="'key' holds something"):
        pack("key", {"inside": odd})


@pytest.mark.parametrize(
    "value",
    [
        np.float64(0.1),
        np.float32(0.1),
        np.int64(-3),
        np.bool_(True),
        np.arange(6, dtype=np.int16).reshape(2, 3).T,
        np.zeros((0, 2)),
        np.array(2.5),
    ],
)
def test_what_numpy_computed_comes_back(value: Any) -> None:
    found = through({"value": value})["value"]
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert np.array_equal(found, value)
    assert found.shape == value.shape


def test_tensors_are_not_copied() -> None:
    tensor = torch.zeros(3)
    assert pack("key", {"a": [tensor]})["key.0"].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("odd", [object(), {1, 2, object()}, lambda: None, torch.nn.ReLU()])
def test_objects_are_refused_when_they_are_saved(odd: Any) -> None:
    with pytest.raises(CheckpointError, match="'key' holds something"):
        pack("key", {"inside": odd})


def test_form_without_its_tensors(tmp_path: Any) -> None:
    entries = pack("key", [torch.zeros(1)])
    del entries["key.0"]
    with pytest.raises(CheckpointError, match="'key' cannot be read"):
        unpack("key", entries)
