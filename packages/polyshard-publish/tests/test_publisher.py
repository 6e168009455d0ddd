"""Ranks publish what they hold: FSDP, HSDP, uneven; balanced, together, without gathering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from publish_runs import full, receiving, rounded, same_bits, small, step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from toy_meeting import await_all
from toy_tensors import Nibbles

from polyshard import fully_shard
from polyshard_publish import (
    CatalogueError,
    FolderTarget,
    Publisher,
    PublishError,
    load_version,
)
from polyshard_publish.digests import block_digests
from polyshard_publish.publisher import GRAIN
from polyshard_testing import World, ranks


def trains_and_publishes(
    rank: int, size: int, address: str, layout: str, keep: Any
) -> tuple[dict[str, Tensor], list[Any]]:
    """Three versions; what the last one must be, and how each went."""
    shape, axes = ((2, size // 2), ("replicas", "dp")) if layout == "hsdp" else ((size,), ("dp",))
    model = small(init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=axes))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    found = []
    with Publisher(model, to=address, dtype=torch.bfloat16, keep=keep) as publisher:
        for version in range(3):
            found.append(publisher.publish(version))
            step(model, optimizer)
            model.count += 1
        found.append(publisher.publish(3))
    wanted = rounded(full(model), torch.bfloat16)
    del wanted["head.weight"]
    return wanted, found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keep", ["digests", "values", "nothing"])
@pytest.mark.parametrize("layout", ["fsdp", "hsdp"])
def test_every_layout_arrives(request: pytest.FixtureRequest, layout: str, keep: str) -> None:
    world: World = request.getfixturevalue("world4" if layout == "hsdp" else "world3")
    with receiving() as (receiver, address):
        answers = world.run(trains_and_publishes, address, layout, keep)
        wanted, published = answers[0]
        assert all(found == published for _, found in answers)  # alike on every rank
        with receiver.serving() as served:
            assert served.version == 3
            assert served.tensors.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert same_bits(served.tensors[name], tensor), name
        whole = published[0]
        # each element once, from one rank, whatever the replicas; the heads come on top
        assert (
            whole.value_bytes - 300 <= sum(t.nbytes for t in wanted.values()) <= whole.value_bytes
        )
        if keep == "values":
            assert published[3].value_bytes < 0.5 * whole.value_bytes
        assert published[3].patched == ((address,) if keep != "nothing" else ())


def memory(rank: int, size: int, folder: str) -> tuple[int, int]:
    """What the allocator of a publishing rank handed out at most, beside model and copies."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(12)])  # 50 MB of fp32
    for layer in model:
        fully_shard(layer)
    publisher = Publisher(model, to=Path(folder), dtype=torch.bfloat16, keep="nothing")
    publisher.publish(1)
    with torch.profiler.profile(profile_memory=True) as profile:
        publisher.publish(2)
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most, publisher.publish(3).rank_bytes[rank]


def test_no_rank_holds_more_than_a_few_pieces(world2: World, tmp_path: Path) -> None:
    """Neither the model (25 MB of bfloat16) nor a shard; and ranks hold and send alike."""
    found = world2.run(memory, str(tmp_path))
    for most, sent in found:
        assert most < 8 * (1 << 20)
        assert most <= 1.1 * sum(each for each, _ in found) / len(found)
        assert sent <= 1.1 * sum(each for _, each in found) / len(found)


class Broken(FolderTarget):
    """A folder that one rank cannot write to."""

    def open(self) -> Any:
        if torch.distributed.get_rank() == 1:
            raise OSError("the disk is gone")
        return super().open()


@ranks(2)
def test_an_error_of_one_rank_is_everybodys(rank: int, size: int, tmp_path: Path) -> None:
    model = nn.Linear(6, 6)
    fully_shard(model)
    good, bad = tmp_path / "good", tmp_path / "bad"
    publisher = Publisher(model, to=[good, Broken(bad)])
    with pytest.raises(
        PublishError, match=r"1 other receivers serve it.*rank 1: .*the disk is gone"
    ):
        publisher.publish(1)
    torch.distributed.barrier()
    assert load_version(good).version == 1
    assert list(bad.iterdir()) == [] or rank  # rank 0 has tidied up
    del model._parameters["bias"]
    if rank == 1:
        del model._parameters["weight"]
    with pytest.raises(PublishError, match=r"version 2 was not published.*rank 1: "):
        publisher.publish(2)
    assert load_version(good).version == 1


@ranks(2)
def test_whole_tensors_for_engines_that_send_themselves(rank: int, size: int) -> None:
    model = small()
    wanted = rounded(full(model), torch.bfloat16)
    found = dict(Publisher(model, to="x:1", dtype=torch.bfloat16).tensors())
    assert found.keys() == wanted.keys() - {"head.weight"}
    assert all(same_bits(found[name], wanted[name]) for name in found)


class Wrapping(Tensor):
    """A subclass around a tensor of eights of its values, as quantized weights are."""

    @staticmethod
    def __new__(cls, codes: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    def dequantize(self) -> Tensor:
        return self.codes.to(torch.float32) / 8

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(str(func))


def test_quantized_tensors_are_published_by_their_values() -> None:
    model = nn.Module()
    codes = torch.arange(6, dtype=torch.int8).view(2, 3)
    model.register_parameter("weight", nn.Parameter(Wrapping(codes), requires_grad=False))
    with receiving() as (receiver, address):
        Publisher(model, to=address, dtype=torch.bfloat16).publish(1)
        with receiver.serving() as served:
            assert torch.equal(served.tensors["weight"].float(), codes / 8)


class Packed(Nibbles):
    """Four-bit codes that say their values."""

    dequantize = Nibbles.unpack


def publishes_packed(rank: int, size: int, address: str) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(10, 7)
    model.weight = nn.Parameter(Packed.pack(model.weight.detach()), requires_grad=False)
    wanted: Tensor = model.weight.dequantize()
    fully_shard(model)
    Publisher(model, to=address).publish(1)
    return wanted


def test_quantized_shards_are_published_by_their_values(world3: World) -> None:
    """Seven rows over three ranks."""
    with receiving() as (receiver, address):
        wanted = world3.run(publishes_packed, address)[0]
        with receiver.serving() as served:
            assert torch.equal(served.tensors["weight"], wanted)


def publishes_another_version(rank: int, size: int, address: str) -> str:
    model = nn.Linear(6, 6)
    fully_shard(model)
    publisher = Publisher(model, to=address)
    publisher.publish(1)
    with pytest.raises(PublishError) as raised:
        publisher.publish(2 + rank)
    assert publisher.publish(4).version == 4
    return str(raised.value)


def test_ranks_that_publish_different_versions_hear_of_it(world2: World) -> None:
    with receiving() as (receiver, address):
        first, second = world2.run(publishes_another_version, address)
        assert first == second
        assert "rank 1: it publishes version 3, rank 0 version 2." in first
        assert receiver.have.version == 4


def test_blocks_are_counted_in_whole_ones() -> None:
    assert block_digests(torch.zeros(GRAIN + 1), GRAIN).shape == (2,)


def loses_a_rank(rank: int, size: int, address: str) -> str:
    model = nn.Linear(600, 600)
    fully_shard(model)
    publisher = Publisher(model, to=address)
    publisher.publish(1)
    await_all("published", size)
    if rank == 1:
        import os

        os._exit(1)
    try:
        publisher.publish(2)
    except PublishError as error:
        return str(error)
    return "nothing was raised"


def test_a_rank_that_dies_leaves_the_old_version(world2: World) -> None:
    with receiving() as (receiver, address):
        with pytest.raises(AssertionError, match="ended without an answer"):
            world2.run(loses_a_rank, address)
        assert receiver.have.version == 1


def other_model(rank: int, size: int, address: str) -> str:
    model = nn.Linear(8, 8 + rank * 0)
    fully_shard(model)
    try:
        Publisher(model, to=address).publish(2)
    except CatalogueError as error:
        return str(error)
    return "nothing was raised"


def test_every_rank_hears_of_another_model(world2: World) -> None:
    with receiving() as (receiver, address):
        Publisher(nn.Linear(3, 3), to=address).publish(1)
        first, second = world2.run(other_model, address)
        assert first == second
        assert "'bias' is F32 [8], the receiver's F32 [3]" in first
        assert receiver.have.version == 1
