"""Tensor-parallel ranks that begin with other batches, or other dropout, are told once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from polyshard import fully_shard
from polyshard.errors import DifferentValuesWarning
from polyshard_tensor_parallel import TensorParallel
from polyshard_testing import ranks


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        result: Tensor = x + self.dropout(self.down(self.up(x).tanh()))
        return result if scale is None else result * scale


def sharded(dropout: float = 0.0) -> Any:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    plugin = TensorParallel(
        {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}, mesh=mesh["tp"]
    )
    torch.manual_seed(0)
    model = nn.Sequential(Block(dropout), Block(dropout))
    plugin.apply(model)
    for block in model:
        fully_shard(block, mesh=mesh["dp"], plugins=[plugin])
    torch.manual_seed(mesh["dp"].get_local_rank())
    return fully_shard(model, mesh=mesh["dp"], plugins=[plugin]), mesh


def told(model: Any, *batches: Tensor, **kwargs: Tensor) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches:
            model(batch, **kwargs)
    return [str(w.message) for w in caught if w.category is DifferentValuesWarning]


def batch_of(seed: int) -> Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))


@ranks(4)
def test_the_batch_of_another_tensor_parallel_rank(rank: int, size: int) -> None:
    model, mesh = sharded()
    (text,) = told(model, batch_of(rank), batch_of(rank))
    group = [2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 1]
    assert f"tensor-parallel ranks {group} begin with different inputs (tensor 0" in text


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@ranks(4)
def test_data_parallel_ranks_may_differ(rank: int, size: int, dropout: float) -> None:
    model, mesh = sharded(dropout)
    batch = batch_of(mesh.get_local_rank("dp"))
    assert told(model, batch, batch) == []


@ranks(4)
def test_other_random_numbers_where_something_drops_out(rank: int, size: int) -> None:
    model, mesh = sharded(0.5)
    torch.manual_seed(rank)
    with torch.no_grad():  # is not training, and compares nothing
        assert told(model, batch_of(rank)) == []
    (text,) = told(model, batch_of(mesh.get_local_rank("dp")))
    assert "begin with different random numbers, though modules drop out: each" in text


@ranks(4)
def test_random_numbers_do_not_matter_otherwise(rank: int, size: int) -> None:
    for dropout in (0.0, 0.5):
        model, mesh = sharded(dropout)
        model.train(not dropout)
        torch.manual_seed(rank)
        assert told(model, batch_of(mesh.get_local_rank("dp"))) == []


@ranks(4)
def test_what_needs_a_gradient_is_not_data(rank: int, size: int) -> None:
    """A stage of a pipeline is handed activations, which may be divided."""
    model, _ = sharded()
    assert told(model, batch_of(rank).requires_grad_()) == []


class WithMore(Block):
    def forward(self, x: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": Tensor.to_sparse,
    "CSR": Tensor.to_sparse_csr,
    "nested": lambda x: torch.nested.nested_tensor([x, x[:1]]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "negative": lambda x: torch.complex(x, x).conj().imag,
}


@ranks(2)
def test_inputs_that_are_not_dense(rank: int, size: int) -> None:
    """They are left out, and views that have yet to be computed are read as their values."""
    mesh = init_device_mesh(torch.get_default_device().type, (1, 2), mesh_dim_names=("dp", "tp"))
    for name, kind in KINDS.items():
        with warnings.catch_warnings():  # torch's own, of what is a prototype or deprecated
            warnings.simplefilter("ignore")
            more, same = kind(batch_of(rank)), kind(batch_of(2))
        is_compared = name in {"conjugate", "negative"}
        for batch, given, differing in (
            (batch_of(2), same, ""),
            (batch_of(rank), same, "inputs (tensor 0 of the batch)"),
            (batch_of(2), more, "inputs (tensor 1 of the batch)" * is_compared),
        ):
            torch.manual_seed(0)
            model: Any = WithMore(0.0)
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            plugin = TensorParallel(plan, mesh=mesh["tp"])
            plugin.apply(model)
            fully_shard(model, mesh=mesh["dp"], plugins=[plugin])
            texts = told(model, batch, more=given)
            assert len(texts) == bool(differing), name
            assert all(f"begin with different {differing}: each" in text for text in texts), name
