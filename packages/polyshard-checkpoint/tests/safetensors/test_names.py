"""Names and files of one's own choosing; and models that get their memory from what is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toy_models import Model, build, full, shard
from toy_runs import assert_equal, whole

from polyshard import fully_shard
from polyshard.errors import CheckpointError, SettingError
from polyshard_checkpoint.safetensors import load_safetensors, save_safetensors
from polyshard_testing import ranks

safetensors: Any = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def only_blocks(name: str) -> str | None:
    return name.replace("blocks.", "layer_") if name.startswith("blocks.") else None


@ranks(2)
@pytest.mark.parametrize("file_bytes", [5_000_000_000, 6_000])
def test_what_is_named_is_saved_and_loaded(
    rank: int, size: int, tmp_path: Path, file_bytes: int
) -> None:
    model = shard(build(1, width=20, hidden=30), fully_shard)
    save_safetensors(model, tmp_path, file_bytes=file_bytes, names=only_blocks, stem="adapter[1]")
    wanted = {only_blocks(n): v for n, v in whole(model).items() if n.startswith("blocks.")}
    found: dict[str, Any] = {}
    for path in tmp_path.glob("*.safetensors"):
        assert path.name.startswith("adapter[1]")
        found |= safetensors.load_file(path)
    assert_equal(found, wanted)
    assert (tmp_path / "adapter[1].safetensors.index.json").exists() == (file_bytes == 6_000)
    other = shard(build(2, width=20, hidden=30), fully_shard)
    head = full(other.head.weight).clone()
    assert load_safetensors(other, tmp_path, names=only_blocks) == frozenset()
    assert_equal(whole(other) | {"head.weight": head}, whole(other))
    assert_equal({only_blocks(n): v for n, v in whole(other).items() if only_blocks(n)}, wanted)


@ranks(2)
def test_names_that_raise_on_one_rank_end_the_call_on_all(
    rank: int, size: int, tmp_path: Path
) -> None:
    model = shard(build(width=20, hidden=30), fully_shard)

    def names(name: str) -> str:
        if rank:
            raise KeyError(name)
        return name

    for work in (save_safetensors, load_safetensors):
        with pytest.raises(CheckpointError, match="rank 1: KeyError"):
            work(model, tmp_path, names=names)
    save_safetensors(model, tmp_path)


@ranks(2)
def test_names_that_cannot_be(rank: int, size: int, tmp_path: Path) -> None:
    model = shard(build(width=20, hidden=30), fully_shard)
    with pytest.raises(SettingError, match=r"'embedding.weight' and 'blocks.* one name, 'one'"):
        save_safetensors(model, tmp_path, names=lambda name: "one")
    for work in (save_safetensors, load_safetensors):
        with pytest.raises(SettingError, match="None for each"):
            work(model, tmp_path, names=lambda name: None)
    for stem in ("", "a/b"):
        with pytest.raises(SettingError, match="stem="):
            save_safetensors(model, tmp_path, stem=stem)
    assert not list(tmp_path.iterdir())


class Tied(nn.Module):
    """A head that shares the embedding's weight, and a buffer that no state dict has."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embedding(tokens) * self.scale)
        return out


@ranks(2)
def test_the_first_name_that_is_kept_is_that_of_a_tied_tensor(
    rank: int, size: int, tmp_path: Path
) -> None:
    model: Any = fully_shard(Tied())
    names = {"head.weight": "output"}.get
    save_safetensors(model, tmp_path, names=names)
    found = safetensors.load_file(tmp_path / "model.safetensors")
    assert_equal(found, {"output": full(model.head.weight.detach())})
    other: Any = fully_shard(Tied())
    load_safetensors(other, tmp_path, names=names)
    assert full(other.embedding.weight).equal(found["output"])


@ranks(1, 2, 3)
def test_a_model_on_meta_gets_memory_and_values(rank: int, size: int, tmp_path: Path) -> None:
    source = build(3, width=20, hidden=31)
    if rank == 0:
        safetensors.save_file(source.state_dict(), tmp_path / "m.safetensors")
    torch.distributed.barrier()
    with torch.device("meta"):
        model = Model(width=20, hidden=31)
    shard(model, fully_shard)
    assert load_safetensors(model, tmp_path) == frozenset()
    assert_equal(whole(model), source.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tokens = torch.arange(6).unsqueeze(0)
    logits = model(tokens)
    assert logits.equal(source(tokens))
    logits.sum().backward()
    optimizer.step()
    assert not full(model.head.weight.detach()).equal(source.head.weight)


@ranks(2)
def test_what_has_values_keeps_them(rank: int, size: int, tmp_path: Path) -> None:
    """A frozen base on meta beside adapters with values, in one unit."""
    source = build(3, width=20, hidden=31)
    state = {n: v for n, v in source.state_dict().items() if ".up." not in n}
    if rank == 0:
        safetensors.save_file(state, tmp_path / "m.safetensors")
    torch.distributed.barrier()
    with torch.device("meta"):
        model = Model(width=20, hidden=31)
    blocks: Any = zip(model.blocks, source.blocks, strict=True)
    for mine, theirs in blocks:
        mine.up = nn.Linear(20, 31)
        mine.up.load_state_dict(theirs.up.state_dict())
    shard(model, fully_shard)
    load_safetensors(model, tmp_path, names=lambda n: None if ".up." in n else n)
    assert_equal(whole(model), source.state_dict())
    tokens = torch.arange(6).unsqueeze(0)
    assert model(tokens).equal(source(tokens))


@ranks(2)
def test_what_would_never_get_values_is_refused(rank: int, size: int, tmp_path: Path) -> None:
    weight = torch.arange(21.0).reshape(7, 3)
    if rank == 0:
        safetensors.save_file({"embedding.weight": weight}, tmp_path / "m.safetensors")
    torch.distributed.barrier()
    with torch.device("meta"):
        model: Any = fully_shard(Tied())
    with pytest.raises(CheckpointError, match=r"1 of its tensors, .*: scale\. Compute"):
        load_safetensors(model, tmp_path)
    assert model.head.weight.is_meta, "nothing was changed"
    model.scale = torch.full((3,), 2.0)
    load_safetensors(model, tmp_path)
    assert full(model.head.weight).equal(weight)
    assert model.head.weight is model.embedding.weight
    assert model(torch.tensor([1])).equal((weight[1:2] * 2) @ weight.t())


def test_one_process_too(tmp_path: Path) -> None:
    source = build(3, width=20, hidden=31)
    save_safetensors(source, tmp_path)
    with torch.device("meta"):
        model = Model(width=20, hidden=31)
    load_safetensors(model, tmp_path)
    assert_equal(whole(model), source.state_dict())


def test_what_is_tied_stays_so_without_sharding(tmp_path: Path) -> None:
    weight = torch.arange(21.0).reshape(7, 3)
    safetensors.save_file({"embedding.weight": weight}, tmp_path / "m.safetensors")
    with torch.device("meta"):
        model = Tied()
    model.scale = torch.ones(3)
    load_safetensors(model, tmp_path)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.equal(weight)
