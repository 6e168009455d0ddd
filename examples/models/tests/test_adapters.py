"""LoRA and QLoRA against one process; what was exported, against ``peft``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import corpus
import llama
import loop
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from polyshard import describe
from polyshard_testing import World

peft: Any = pytest.importorskip("peft")
adapters: Any = importlib.import_module("adapters")  # which imports peft
# peft 0.21 asks transformers by a name that transformers 5 is to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

STEPS = 5


def tuned(rank: int, size: int, base: Path, out: Path, nf4: bool, merged: Path | None) -> Any:
    return adapters.tune(base, out, steps=STEPS, nf4=nf4, merged=merged)


def alone(base: Path, nf4: bool) -> tuple[list[float], Any]:
    """The same training, by torch and peft in one process; and the model."""
    whole = adapters.in_four_bits(base) if nf4 else LlamaForCausalLM.from_pretrained(base)
    model = adapters.with_adapters(whole)
    optimizer = torch.optim.AdamW(adapters.trained(model), lr=adapters.LR)
    return loop.train(model, [optimizer], STEPS), model


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_train_adapters_as_one_process(
    request: pytest.FixtureRequest, base: Path, tmp_path: Path, size: int, nf4: bool
) -> None:
    if nf4:
        pytest.importorskip("torchao")
    world: World = request.getfixturevalue(f"world{size}")
    runs = world.run(tuned, base, tmp_path, nf4, None, timeout=200.0)
    assert all(losses == runs[0] for losses in runs)
    expected, model = alone(base, nf4)
    assert runs[0] == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.5, "nothing was learnt"
    loaded = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), tmp_path)
    found, wanted = state_of(loaded), state_of(model)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-4, msg=name)


def state_of(model: Any) -> dict[str, Tensor]:
    """The adapters, under the names of peft's files."""
    state: dict[str, Tensor] = peft.get_peft_model_state_dict(model)
    return state


def exported(rank: int, size: int, base: Path, out: Path, merged: Path) -> dict[str, Tensor]:
    """Trained adapters three times: in peft's files, merged, and gathered by torch."""
    model = adapters.sharded(base)
    optimizer = torch.optim.AdamW(adapters.trained(model), lr=adapters.LR)
    loop.train(model, [optimizer], 2)
    adapters.export(model, out)
    gathered = {n: v.full_tensor() for n, v in state_of(model).items()}
    adapters.merge(model)
    llama.export(model.base_model.model, merged, names=adapters.name_of_merged)
    return gathered


def test_peft_loads_what_was_exported(world2: World, base: Path, tmp_path: Path) -> None:
    out, merged = tmp_path / "adapters", tmp_path / "merged"
    gathered = world2.run(exported, base, out, merged, timeout=200.0)[0]
    loaded = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), out)
    found = state_of(loaded)
    assert found.keys() == gathered.keys()
    assert all(torch.equal(found[name], value) for name, value in gathered.items())
    assert any(value.any() for name, value in gathered.items() if "lora_B" in name)
    theirs = loaded.merge_and_unload()
    ours, messages = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not any(messages.values()), messages
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, msg=name)
    tokens = corpus.batch(99)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits)


def gather_bytes(rank: int, size: int, base: Path, nf4: bool) -> int:
    return sum(group.gather_bytes for group in describe(adapters.sharded(base, nf4=nf4)).groups)


def test_a_base_in_four_bits_travels_so(world2: World, base: Path) -> None:
    """What is frozen in NF4: four bits a weight, and a byte for the scale of 64 of them."""
    pytest.importorskip("torchao")
    native, four_bits = (world2.run(gather_bytes, base, nf4)[0] for nf4 in (False, True))
    config = llama.config()
    heads = config.num_attention_heads + config.num_key_value_heads
    width, head = config.hidden_size, config.head_dim
    weights = 2 * width * (2 * heads * head + 3 * config.intermediate_size)
    sent = weights // 2  # by each of two ranks: half of them
    assert native - four_bits == pytest.approx(sent * (4 - 0.5 - 1 / 64), rel=0.01)
