"""Models in files that Hugging Face's libraries write and read; those are the oracle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from toy_models import build, full, shard
from toy_runs import assert_equal, whole

import polyshard_resilience
from polyshard import fully_shard
from polyshard._torch.private import local_tensor
from polyshard.errors import CheckpointError, SettingError
from polyshard_checkpoint import Checkpoints, TrainingState
from polyshard_checkpoint.safetensors import load_safetensors, save_safetensors
from polyshard_checkpoint.safetensors.header import DTYPES, make_header, read_header
from polyshard_checkpoint.safetensors.reading import weight_files
from polyshard_resilience import Corruption
from polyshard_testing import ranks

safetensors: Any = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@ranks(1, 2, 3)
@pytest.mark.parametrize("file_bytes", [5_000_000_000, 6_000])
def test_what_is_saved_is_what_the_library_reads(
    rank: int, size: int, tmp_path: Path, file_bytes: int
) -> None:
    model = shard(build(width=20, hidden=30, layers=2), fully_shard)
    save_safetensors(model, tmp_path, file_bytes=file_bytes)
    found: dict[str, Any] = {}
    for path in tmp_path.glob("*.safetensors"):
        found |= safetensors.load_file(path)
    assert_equal(found, whole(model))
    if file_bytes < 7_000:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(found)
        assert set(index["weight_map"].values()) == {p.name for p in tmp_path.glob("*.safetensors")}
        assert index["metadata"]["total_size"] == sum(v.nbytes for v in found.values())
    else:
        assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@ranks(1, 2, 3)
@pytest.mark.parametrize("dim", [0, 1])
def test_what_the_library_writes_is_what_is_loaded(
    rank: int, size: int, tmp_path: Path, dim: int
) -> None:
    source, target = build(1, width=20, hidden=30), build(2, width=20, hidden=30)
    if rank == 0:
        parts = list(source.state_dict().items())
        safetensors.save_file(dict(parts[:3]), tmp_path / "a.safetensors")
        safetensors.save_file(dict(parts[3:]), tmp_path / "b.safetensors")
    torch.distributed.barrier()
    placed = {"shard_placement_fn": lambda p: Shard(dim if p.ndim > dim else 0)}
    shard(target, fully_shard, **placed)
    assert load_safetensors(target, tmp_path) == frozenset()
    assert_equal(whole(target), whole(source))


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_loaded_is_no_corruption(
    rank: int, size: int, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Read to its place, or converted on the way."""
    polyshard_resilience.enable()
    model: Any = fully_shard(nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_safetensors(model, tmp_path, dtype=dtype)
    before = whole(model)

    def step() -> None:
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    guard = Corruption(model, optimizer, every=1)
    step()
    versions = [local_tensor(p)._version for p in model.parameters()]
    load_safetensors(model, tmp_path)
    for parameter, version in zip(model.parameters(), versions, strict=True):
        assert local_tensor(parameter)._version > version
    assert_equal(whole(model), before)
    step()
    del guard


@ranks(4)
def test_replicas_write_once_and_read_all(rank: int, size: int, tmp_path: Path) -> None:
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("r", "s"))
    model = shard(build(1), fully_shard, mesh=mesh)
    save_safetensors(model, tmp_path, dtype=torch.bfloat16)
    other = shard(build(2), fully_shard, mesh=mesh)
    load_safetensors(other, tmp_path)
    wanted = {name: value.bfloat16().float() for name, value in whole(model).items()}
    assert_equal(whole(other), wanted)


def read_bytes() -> int:
    """What this process has read from files, by any call."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def resident_peak() -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


@ranks(2)
@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="counts with Linux's /proc")
def test_a_rank_reads_its_part_and_needs_little_more(rank: int, size: int, tmp_path: Path) -> None:
    model = nn.Linear(8192, 12288, bias=False)
    whole_bytes = model.weight.nbytes
    if rank == 0:
        safetensors.save_file({"weight": model.weight.detach()}, tmp_path / "m.safetensors")
    torch.distributed.barrier()
    fully_shard(model)
    load_safetensors(model, tmp_path)  # imports, and code that the kernel had let go of
    needed = []
    for _ in range(3):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
        before, peak = read_bytes(), resident_peak()
        load_safetensors(model, tmp_path)
        assert read_bytes() - before <= whole_bytes / size + (1 << 20)
        needed.append(resident_peak() - peak)
    assert min(needed) <= 64 << 20, f"the shard itself was there already: {needed}"


@ranks(2)
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_and_generates_from_it(rank: int, size: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(6).unsqueeze(0)
    expected = model.generate(tokens, max_new_tokens=5, do_sample=False)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    save_safetensors(model, tmp_path)
    if rank == 0:
        config.save_pretrained(tmp_path)
    torch.distributed.barrier()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.generate(tokens, max_new_tokens=5, do_sample=False), expected)
    with torch.device("meta"):
        again = transformers.LlamaForCausalLM(config)
    for layer in again.model.layers:
        fully_shard(layer)
    fully_shard(again)
    again.to_empty(device=torch.get_default_device())
    load_safetensors(again, tmp_path)
    assert full(again.lm_head.weight).equal(full(model.lm_head.weight))


@pytest.mark.parametrize("dtype", ["F4", "F99"])
def test_a_dtype_that_is_not_supported_is_named(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"w": {"dtype": dtype, "shape": [2], "data_offsets": [0, 1]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(1))
    with pytest.raises(CheckpointError, match=f"safetensors': 'w' has dtype {dtype}, which"):
        read_header(path)


def test_files_are_in_the_librarys_order(tmp_path: Path) -> None:
    model = nn.Module()
    dtypes = torch.int64, torch.float64, torch.complex64, torch.float32, torch.uint64
    for name, dtype in zip("abcde", dtypes, strict=True):
        model.register_buffer(name, torch.ones(3, device="cpu").to(dtype))
    save_safetensors(model, tmp_path)
    expected = safetensors.save(dict(model.named_buffers()), metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == expected


def test_every_dtype_of_the_format(tmp_path: Path) -> None:
    tensors = {
        name: torch.arange(4, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
        for name, dtype in DTYPES.items()
        if name != "BOOL"
    }
    tensors |= {
        "flag": torch.tensor([True, False]),
        "none": torch.zeros(0, 3),
        "one": torch.ones(()),
    }
    model = nn.Module()
    for name, value in tensors.items():
        model.register_buffer(name, value)
    save_safetensors(model, tmp_path / "ours")
    found = safetensors.load_file(tmp_path / "ours" / "model.safetensors")
    assert set(found) == set(tensors)
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert found[name].reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8))
    (tmp_path / "theirs").mkdir()
    safetensors.save_file(tensors, tmp_path / "theirs" / "m.safetensors")
    empty = nn.Module()
    for name, value in tensors.items():
        empty.register_buffer(name, torch.zeros_like(value))
    load_safetensors(empty, tmp_path / "theirs")
    for name, value in tensors.items():
        same = getattr(empty, name).reshape(-1).view(torch.uint8)
        assert same.equal(value.reshape(-1).view(torch.uint8)), name


def test_headers_of_the_library_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.save_file({"b": torch.ones(2, 3), "a": torch.arange(5)}, path, {"format": "pt"})
    content, found = path.read_bytes(), read_header(path)
    for name, value in safetensors.load_file(path).items():
        stored = found[name]
        data = content[stored.begin : stored.begin + stored.nbytes]
        assert data == value.numpy().tobytes()


GOOD = make_header({"a": (torch.float32, torch.Size([2]))})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "a header of 0 bytes"),
        (b"\xff" * 20, "a header of"),
        (GOOD, "outside of the file"),
        (GOOD.replace(b"[0,8]", b"[0,4]") + bytes(8), "its shape means 8"),
        (GOOD.replace(b'"shape":[2]', b'"shape":2  ') + bytes(8), "TypeError"),
        (GOOD + bytes(9), "its tensors end at 104, the file at 105"),
        (GOOD.replace(b"[0,8]", b"[1,9]") + bytes(9), "a gap before"),
        (GOOD.replace(b"{", b"[", 1) + bytes(8), "JSONDecodeError"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"m\.safetensors' is no safetensors file.*{said}"):
        load_safetensors(build(), tmp_path)


@ranks(2)
def test_what_does_not_fit_is_said_on_all_ranks(rank: int, size: int, tmp_path: Path) -> None:
    model = shard(build(width=20, hidden=30), fully_shard)
    before = whole(model)
    with pytest.raises(CheckpointError, match="there is no tensor"):
        load_safetensors(model, tmp_path / "none")
    if rank == 0:
        safetensors.save_file({"head.weight": torch.ones(3)}, tmp_path / "m.safetensors")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"lack 19 tensors of the model: blocks\.0\.down"):
        load_safetensors(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"holds m\.safetensors already"):
        save_safetensors(model, tmp_path)
    with pytest.raises(SettingError, match="file_bytes=0"):
        save_safetensors(model, tmp_path, file_bytes=0)
    assert_equal(whole(model), before)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


@ranks(2)
@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
@pytest.mark.parametrize("compiled", [False, True])
def test_any_name_of_a_tied_tensor_will_do(
    rank: int, size: int, tmp_path: Path, name: str, compiled: bool
) -> None:
    wanted = torch.arange(15.0).reshape(5, 3)
    if rank == 0:
        safetensors.save_file({name: wanted}, tmp_path / "m.safetensors")
    torch.distributed.barrier()
    model: Any = fully_shard(Tied())
    model = torch.compile(model, backend="eager") if compiled else model
    assert load_safetensors(model, tmp_path) == frozenset()
    assert full(model.head.weight).equal(wanted)
    assert full(model.embedding.weight).equal(wanted)
    save_safetensors(model, tmp_path / "again")
    assert set(read_header(tmp_path / "again" / "model.safetensors")) == {"embedding.weight"}


@ranks(2)
def test_no_process_group_is_left(rank: int, size: int, tmp_path: Path) -> None:
    model = fully_shard(nn.Linear(3, 3))
    before = len(torch.distributed.distributed_c10d._world.pg_map)
    save_safetensors(model, tmp_path / "weights")
    load_safetensors(model, tmp_path / "weights")
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, TrainingState(model))
    assert len(torch.distributed.distributed_c10d._world.pg_map) == before


@ranks(2)
def test_a_failed_save_leaves_nothing(rank: int, size: int, tmp_path: Path) -> None:
    model = shard(build(width=20, hidden=30), fully_shard)
    if rank == 1:
        os.pwrite, kept = failing, os.pwrite
    try:
        with pytest.raises(CheckpointError, match=r"rank 1: OSError: .*No space"):
            save_safetensors(model, tmp_path)
    finally:
        if rank == 1:
            os.pwrite = kept
    torch.distributed.barrier()
    assert not list(tmp_path.iterdir())


def failing(*arguments: Any) -> int:
    raise OSError(28, "No space left on device")


def test_one_file_comes_before_an_index(tmp_path: Path) -> None:
    """``save_pretrained`` leaves the index of an earlier model beside it."""
    index = {"weight_map": {"weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("model.safetensors", "model-00001-of-00002.safetensors"):
        safetensors.save_file({"weight": torch.ones(2)}, tmp_path / name)
    assert weight_files(tmp_path, "model") == [tmp_path / "model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    assert weight_files(tmp_path, "model") == [tmp_path / "model-00001-of-00002.safetensors"]
