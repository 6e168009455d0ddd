"""What is read and written of a folder, how much of it, and the error where it does not fit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install transformers")

import torch
from pretrained_models import ARCHITECTURES, QWEN3_MOE, read_bytes, resident, shard, values
from safetensors import torch as safetensors
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import polyshard
from polyshard.errors import CheckpointError, SettingError
from polyshard_checkpoint import load_pretrained, save_pretrained
from polyshard_checkpoint.pretrained import library
from polyshard_checkpoint.safetensors import header
from polyshard_testing import ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
LLAMA, MIXTRAL = ARCHITECTURES["Llama"], ARCHITECTURES["Mixtral"]


def given(folder: Path, architecture: Any = LLAMA, **how: Any) -> dict[str, torch.Tensor]:
    """A folder of transformers', and the values in it; by the first rank, for all."""
    model = architecture.build()
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder, **how)
    torch.distributed.barrier()
    return values(model)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_complex_values_that_nobody_computed_are_seen() -> None:
    value = torch.full((3,), float("nan"), dtype=torch.complex64, device="cpu")
    assert library._is_unlikely(value).all()


@ranks(2)
def test_repositories_with_a_second_form_of_the_weights(
    rank: int, size: int, tmp_path: Path
) -> None:
    """Mistral's have the same weights under other names beside the files that the index names."""
    wanted = given(tmp_path, max_shard_size="30KB")
    if rank == 0:
        safetensors.save_file(
            {"tok_embeddings": torch.ones(2)}, tmp_path / "consolidated.safetensors"
        )
    torch.distributed.barrier()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model = shard(LLAMA.on_meta(tmp_path))
    load_pretrained(model, tmp_path)
    assert_same(values(model), wanted)


@ranks(3)
def test_replicas_dtypes_and_a_single_file(rank: int, size: int, tmp_path: Path) -> None:
    wanted = given(tmp_path)
    mesh = init_device_mesh(
        torch.get_default_device().type, (3, 1), mesh_dim_names=("replicas", "shards")
    )
    model = shard(LLAMA.on_meta(tmp_path).bfloat16(), mesh=mesh)
    load_pretrained(model, tmp_path / "model.safetensors")
    found = values(model)
    for name, value in wanted.items():
        assert torch.equal(found[name], value.to(found[name].dtype)), name
    assert found["lm_head.weight"].dtype == torch.bfloat16


@ranks(3)
@pytest.mark.parametrize("experts", [MIXTRAL, QWEN3_MOE], ids=lambda each: each.name)
def test_experts_go_apart_into_files_and_come_back(
    rank: int, size: int, tmp_path: Path, experts: Any
) -> None:
    """Five experts over three ranks, some of which have parts of two."""
    wanted = given(tmp_path / "base", experts)
    model = shard(experts.on_meta(tmp_path / "base"))
    load_pretrained(model, tmp_path / "base")
    assert_same(values(model), wanted)
    for name, revert in (("apart", True), ("stacked", False)):
        save_pretrained(model, tmp_path / name, save_original_format=revert)
        names = set(header.read_header(tmp_path / name / "model.safetensors"))
        assert any("experts.4." in each for each in names) == revert
        again = shard(experts.on_meta(tmp_path / name))
        load_pretrained(again, tmp_path / name)
        assert_same(values(again), wanted)


def changed(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.load_file(path)
    change(tensors)
    safetensors.save_file(tensors, path, {"format": "pt"})


def spoil(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.7.odd"] = torch.ones(3)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()
    tensors["model.layers.1.input_layernorm.weight"] = torch.ones(24, dtype=torch.int32)


@ranks(2)
def test_all_that_does_not_fit_is_said_at_once_and_nothing_is_read(
    rank: int, size: int, tmp_path: Path
) -> None:
    given(tmp_path)
    if rank == 0:
        changed(tmp_path, spoil)
    torch.distributed.barrier()
    model = shard(LLAMA.on_meta(tmp_path))
    with pytest.raises(CheckpointError) as raised:
        load_pretrained(model, tmp_path)
    for said in (
        "2 tensors of the model are not in the files: model.layers.0.mlp.up_proj.weight, "
        "model.norm.weight",
        "1 tensors in the files are not in the model: model.layers.7.odd",
        "'lm_head.weight' is (66, 24) in the files and (67, 24) in the model",
        "'model.layers.1.input_layernorm.weight' is torch.int32 in the files",
    ):
        assert said in str(raised.value)
    assert model.model.norm.weight.is_meta


@ranks(2)
def test_what_is_ignored_keeps_its_values(rank: int, size: int, tmp_path: Path) -> None:
    wanted = given(tmp_path)
    if rank == 0:
        changed(tmp_path, spoil)
    torch.distributed.barrier()
    model: Any = LLAMA.build()
    nn.init.ones_(model.lm_head.weight)
    shard(model)
    patterns = ["*.odd", "lm_head.*", "model.norm.weight", "*.up_proj.weight", "*layernorm.weight"]
    load_pretrained(model, tmp_path, ignore=patterns)
    found = values(model)
    assert torch.equal(found["lm_head.weight"], torch.ones(67, 24))
    kept = {name: found[name] for name in wanted if name != "lm_head.weight"}
    assert_same(kept, {name: wanted[name] for name in kept})
    with pytest.raises(CheckpointError, match=r"2 tensors of the model are not .*, model\.norm"):
        load_pretrained(shard(LLAMA.on_meta(tmp_path)), tmp_path, ignore=patterns)


@ranks(2)
def test_a_missing_expert_is_named(rank: int, size: int, tmp_path: Path) -> None:
    given(tmp_path, MIXTRAL)
    if rank == 0:
        changed(tmp_path, lambda t: t.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight"))
    torch.distributed.barrier()
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj' is \(4, 24, 36\)"
    ):
        load_pretrained(shard(MIXTRAL.on_meta(tmp_path)), tmp_path)


@ranks(2)
def test_folders_that_are_none(rank: int, size: int, tmp_path: Path) -> None:
    given(tmp_path, max_shard_size="30KB")
    model = shard(LLAMA.on_meta(tmp_path))
    with pytest.raises(CheckpointError, match="there is no 'no/where'"):
        load_pretrained(model, "no/where")
    torch.distributed.barrier()
    if rank == 0:
        (tmp_path / "model-00002-of-00002.safetensors").unlink(missing_ok=True)
        last = sorted(tmp_path.glob("model-*.safetensors"))[-1]
        last.unlink()
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="names files that are not in"):
        load_pretrained(model, tmp_path)
    with pytest.raises(SettingError, match="not Linear"):
        save_pretrained(nn.Linear(2, 2), tmp_path)


WIDE: dict[str, Any] = {
    "vocab_size": 8001, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip


@ranks(2)
@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="counts with Linux's /proc")
def test_a_rank_reads_and_holds_its_part(rank: int, size: int, tmp_path: Path) -> None:
    """Both names of the tied tensor are in the files, and it is read once."""
    config = LlamaConfig(**WIDE)
    if rank == 0:
        whole = LlamaForCausalLM(config)
        whole.save_pretrained(tmp_path)
        changed(
            tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
        )
        del whole
    torch.distributed.barrier()

    def built() -> Any:
        with torch.device("meta"):
            return shard(LlamaForCausalLM(config))

    load_pretrained(built(), tmp_path)  # imports, and code that the kernel had let go of
    model = built()
    total = sum(p.numel() * 4 for p in model.parameters())
    unit = 8001 * 512 * 4
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    read, held = read_bytes(), resident("VmRSS:")
    load_pretrained(model, tmp_path)
    assert read_bytes() - read <= 1.05 * total / size
    assert resident("VmHWM:") - held <= total / size + unit
    assert model.lm_head.weight is model.model.embed_tokens.weight


@ranks(2)
def test_old_weights_are_replaced(rank: int, size: int, tmp_path: Path) -> None:
    given(tmp_path, max_shard_size="30KB")
    model = shard(LLAMA.on_meta(tmp_path))
    load_pretrained(model, tmp_path)
    with torch.no_grad():
        model.model.norm.weight.fill_(5)
    torch.distributed.barrier()
    save_pretrained(model, tmp_path, dtype=torch.bfloat16)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert loaded.model.norm.weight.eq(5).all()


@ranks(2)
def test_a_save_that_fails_leaves_the_old_weights(rank: int, size: int, tmp_path: Path) -> None:
    given(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    model = shard(LLAMA.on_meta(tmp_path))
    load_pretrained(model, tmp_path)
    kept = os.pwrite
    if rank == 1:
        os.pwrite = failing
    try:
        with pytest.raises(CheckpointError, match=r"rank 1: OSError: .*No space"):
            save_pretrained(model, tmp_path)
    finally:
        os.pwrite = kept
    torch.distributed.barrier()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def failing(*arguments: Any) -> int:
    raise OSError(28, "No space left on device")


@ranks(2)
def test_a_base_model_fills_one_with_a_head_and_back(rank: int, size: int, tmp_path: Path) -> None:
    """Names in files lack, or have, the prefix that the model's have."""
    wanted = given(tmp_path / "whole")
    model: Any = shard(LLAMA.on_meta(tmp_path / "whole").model)
    load_pretrained(model, tmp_path / "whole", ignore=["lm_head.weight"])
    assert_same(
        values(model), {n.removeprefix("model."): v for n, v in wanted.items() if n[:2] != "lm"}
    )
    save_pretrained(model, tmp_path / "base")
    headed: Any = LLAMA.build()
    nn.init.zeros_(headed.model.norm.weight)
    shard(headed)
    load_pretrained(headed, tmp_path / "base", ignore=["lm_head.weight"])
    assert_same(values(headed), wanted)


class Doubling(nn.Module):
    """No model of transformers, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.register_buffer("scale", torch.full((3,), 2.0))


@ranks(2)
def test_other_models_by_their_own_names(rank: int, size: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = Doubling()
    if rank == 0:
        safetensors.save_file(source.state_dict(), tmp_path / "model.safetensors")
    torch.distributed.barrier()
    with torch.device("meta"):
        model: Any = polyshard.fully_shard(Doubling())
    load_pretrained(model, tmp_path)
    assert_same(values(model), dict(source.state_dict()))
