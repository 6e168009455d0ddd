"""Ranks that start from different values are told, unless what differed was replaced meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from toy_models import full

from polyshard import ShardPlacement, fully_shard
from polyshard.engine.initial_values import BLOCK_WORDS, checksum, in_hex
from polyshard.errors import DifferentValuesWarning
from polyshard_testing import World, ranks


def model_of(seed: int, *widths: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(widths)])


def told(model: Any, width: int = 4) -> list[str]:
    """What two forwards warn of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with torch.no_grad():
                model(torch.ones(1, width))
    return [str(w.message) for w in caught if w.category is DifferentValuesWarning]


def sharded_apart(rank: int, size: int, shape: tuple[int, ...], odd: int) -> list[str]:
    mesh = init_device_mesh(
        torch.get_default_device().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
    )
    model = model_of(0, 4, 8, 4)
    if rank == odd:
        with torch.no_grad():
            model[1].weight[0, 0] += 1
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return told(fully_shard(model, mesh=mesh))


@pytest.mark.parametrize("odd", [-1, 0, 3])
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=str)
def test_every_rank_is_told_once(world4: World, shape: tuple[int, ...], odd: int) -> None:
    texts = world4.run(sharded_apart, shape, odd)
    if odd < 0:
        assert texts == [[]] * 4
        return
    first = texts[0]
    assert texts == [first] * 4
    (text,) = first
    other = 3 if odd == 3 else 1
    assert f"ranks {[0, other]} were given different initial values of 1.weight." in text


def all_apart(rank: int, size: int) -> list[str]:
    return told(fully_shard(model_of(rank, *[4] * 8)))


def test_many_parameters_are_counted(world4: World) -> None:
    texts = world4.run(all_apart)
    assert texts == [texts[0]] * 4
    (text,) = texts[0]
    assert "ranks [0, 1, 2, 3] were given different initial values of 0.weight, 0.bias," in text
    assert "3.bias and 6 more. fully_shard" in text


@ranks(2)
def test_each_rank_trains_its_part_of_its_own_values(rank: int, size: int) -> None:
    """As with FSDP2: it is told, and done."""
    model: Any = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(float(rank))
    fully_shard(model)
    with pytest.warns(DifferentValuesWarning, match=r"ranks \[0, 1\] .* of weight\."):
        model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(full(model.weight.detach()), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


@ranks(2)
def test_a_filter_silences_it(rank: int, size: int) -> None:
    model = fully_shard(model_of(rank, 4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DifferentValuesWarning)
        model(torch.ones(1, 4)).sum().backward()


def loaded_from_first(model: Any, rank: int) -> None:
    state = model_of(0, 4, 8, 1).state_dict() if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def copied(model: Any, rank: int) -> None:
    """Through ``.data``, which no version counts."""
    for parameter, value in zip(model.parameters(), model_of(9, 4, 8, 1).parameters(), strict=True):
        local = parameter.data.to_local()
        rows = value.detach().chunk(2)
        if rank < len(rows):
            local.copy_(rows[rank])


REPLACED: dict[str, Callable[[Any, int], None]] = {
    "broadcast from rank 0": loaded_from_first,
    "copied": copied,
}


@pytest.mark.parametrize("how", REPLACED)
@ranks(2)
def test_what_was_replaced_is_not_compared(rank: int, size: int, how: str) -> None:
    """The second bias has one row, so rank 1 holds nothing of it, and no value is compared."""
    model = fully_shard(model_of(rank, 4, 8, 1))
    REPLACED[how](model, rank)
    assert told(model) == []


@ranks(2)
def test_meta_on_some_ranks_or_all(rank: int, size: int) -> None:
    """What has no values cannot differ."""
    with torch.device("meta") if rank else torch.get_default_device():
        model = model_of(0, 4, 4)
    fully_shard(model)
    if rank:
        model.to_empty(device=torch.get_default_device())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_(7)
    assert told(model) == []


@ranks(4)
def test_experts_are_compared_with_their_own(rank: int, size: int) -> None:
    """Parameters with a mesh of their own: different on other ranks of the root's mesh."""
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("expert", "shard")
    )
    torch.manual_seed(mesh.get_local_rank("expert"))
    expert = nn.Linear(4, 4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), expert)
    own = {expert.weight, expert.bias}

    def place(parameter: nn.Parameter) -> ShardPlacement | None:
        return ShardPlacement(Shard(0), mesh["shard"]) if parameter in own else None

    fully_shard(model, shard_placement_fn=place)
    assert told(model) == []


@ranks(4)
def test_experts_that_differ_are_told_to_their_own(rank: int, size: int) -> None:
    mesh = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("expert", "shard")
    )
    torch.manual_seed(rank if mesh.get_local_rank("expert") else 0)
    expert = nn.Linear(4, 4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), expert)
    own = {expert.weight, expert.bias}

    def place(parameter: nn.Parameter) -> ShardPlacement | None:
        return ShardPlacement(Shard(0), mesh["shard"]) if parameter in own else None

    fully_shard(model, shard_placement_fn=place)
    texts = told(model)
    assert len(texts) == mesh.get_local_rank("expert")
    assert all(
        "ranks [2, 3] were given different initial values of 1.weight, 1.bias." in t for t in texts
    )


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksums_are_of_bits_in_order(dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1, 0], [0, 0, 1]]).to(dtype)
    assert in_hex(checksum(values)) == in_hex(checksum(values.clone()))
    assert checksum(values.t()) == checksum(values.t().contiguous())
    assert checksum(values) != checksum(values.flip(1))
    assert len(in_hex(checksum(values[:0]))) == len(in_hex(checksum(values[0, 0]))) == 16


SIZES = st.sampled_from(
    [1, 7, 8, 9, 8 * BLOCK_WORDS - 1, 8 * BLOCK_WORDS, 8 * BLOCK_WORDS + 9, 70000]
)


@given(st.data(), SIZES)
def test_any_changed_byte_changes_it(data: st.DataObject, size: int) -> None:
    values = torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size)
    )
    changed = values.clone()
    at = data.draw(st.integers(0, size - 1))
    changed[at] ^= data.draw(st.integers(1, 255))
    assert checksum(values) != checksum(changed)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), values])[1:]  # begins elsewhere
    assert checksum(values) == checksum(shifted)


@pytest.mark.parametrize("numel", [3, 2 * BLOCK_WORDS, 8 * BLOCK_WORDS, 100_000])
def test_alike_in_every_word_and_yet_different(numel: int) -> None:
    """Sums of equal words must not wrap around to the same."""
    fills = [0.0, 1.0, -1.0, 2.0, 0.5, float("nan"), float("inf")]
    found = {in_hex(checksum(torch.full((numel,), fill))) for fill in fills}
    alternating = torch.ones(numel)
    signs: Tensor = alternating.clone()
    signs[1::2] = -1
    found |= {in_hex(checksum(signs)), in_hex(checksum(-signs))}
    assert len(found) == len(fills) + 2
