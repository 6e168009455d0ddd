"""Adapters of peft around a sharded base; peft alone is the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install transformers")

import torch
from pretrained_models import ARCHITECTURES, shard, values
from torch import Tensor
from transformers import LlamaForCausalLM

from polyshard_checkpoint import load_pretrained, save_pretrained
from polyshard_testing import ranks

peft: Any = pytest.importorskip("peft", reason="pip install peft")
pytestmark = pytest.mark.filterwarnings("ignore")
LLAMA = ARCHITECTURES["Llama"]


def adapted(base: Any, seed: int) -> Any:
    """With adapters, and a norm that is trained instead of a copy."""
    settings = {"r": 3, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["norm"]}
    model = peft.get_peft_model(base, peft.LoraConfig(**settings))
    random = torch.Generator().manual_seed(seed)
    for name, parameter in list(model.named_parameters()):
        if "lora_" in name:  # on meta too: adapters are small, and have values
            owner, _, key = name.rpartition(".")
            made = torch.nn.Parameter(torch.randn(parameter.shape, generator=random))
            setattr(model.get_submodule(owner), key, made)
    return model


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@ranks(2, 3)
def test_they_are_saved_and_loaded_as_by_peft(rank: int, size: int, tmp_path: Path) -> None:
    base, ours, theirs = tmp_path / "base", tmp_path / "ours", tmp_path / "theirs"
    if rank == 0:
        LLAMA.build().save_pretrained(base)
    torch.distributed.barrier()
    oracle = adapted(LlamaForCausalLM.from_pretrained(base), 1)
    model = shard(adapted(LLAMA.on_meta(base), 1))
    load_pretrained(model, base)  # of the base; adapters keep their values
    assert_same(values(model), values(oracle))
    for each in (model, oracle):
        with torch.no_grad():
            for name, parameter in each.named_parameters():
                if "modules_to_save" in name:
                    parameter.mul_(3)
    save_pretrained(model, ours)
    if rank == 0:
        oracle.save_pretrained(theirs)
    torch.distributed.barrier()
    one, other = ({p.name: p.read_bytes() for p in f.iterdir()} for f in (ours, theirs))
    assert one.keys() == other.keys()
    weights, config = "adapter_model.safetensors", "adapter_config.json"
    assert one[weights] == other[weights]
    both = [json.loads(each[config]) for each in (one, other)]
    for each in both:
        del each["base_model_name_or_path"]
    assert both[0] == both[1]
    again = shard(adapted(LLAMA.on_meta(base), 2))
    load_pretrained(again, base)
    load_pretrained(again, ours)
    assert_same(values(again), values(oracle))
    loaded = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), ours)
    assert_same(values(loaded), values(oracle))
