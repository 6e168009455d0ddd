"""A real model fine-tuned and exported: what CI runs of ``examples/models``."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyshard_testing import World

STACK = ("quantized", "tensor_parallel")
STEPS = 3


def test_a_model_is_tuned_and_exported(
    world4: World, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Loaded in shards, tensor parallelism x FSDP x int8, and what ``transformers`` makes of it."""
    if pytestconfig.getoption("--stack") not in (None, "quantized+tensor-parallel"):
        pytest.skip("belongs to the stack quantized+tensor-parallel")
    for name in ("transformers", *(f"polyshard_{part}" for part in STACK)):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    llama, loop, corpus = (importlib.import_module(name) for name in ("llama", "loop", "corpus"))
    base, out = tmp_path / "base", tmp_path / "out"
    llama.begin(base)
    losses, gathered = world4.run(tuned, base, out, timeout=200.0)[0]
    alone = llama.LlamaForCausalLM.from_pretrained(base)
    expected = loop.train(alone, [torch.optim.AdamW(alone.parameters(), lr=1e-3)], STEPS)
    assert losses == pytest.approx(expected, abs=0.01)
    assert losses[-1] < losses[0] - 0.5
    whole = llama.LlamaForCausalLM(llama.config()).eval()
    whole.load_state_dict(gathered)
    loaded = llama.LlamaForCausalLM.from_pretrained(out)
    tokens = corpus.batch(STEPS)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, whole(tokens).logits)
    prompt, settings = corpus.tokens_of("The "), {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(loaded.generate(prompt, **settings), whole.generate(prompt, **settings))


def tuned(rank: int, size: int, base: Path, out: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the model as torch gathers it."""
    llama, loop, full = (importlib.import_module(name) for name in ("llama", "loop", "full"))
    mesh = llama.meshes(2)
    model: Any = llama.load(base, mesh, full.quantized())
    losses = loop.train(model, [torch.optim.AdamW(model.parameters(), lr=1e-3)], STEPS, mesh["dp"])
    llama.export(model, out)
    return losses, {name: value.full_tensor() for name, value in model.state_dict().items()}
