"""Fine-tuning of all weights against one process, and exports against ``transformers``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import completion
import corpus
import full
import llama
import loop
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from polyshard_testing import RankError, World

STEPS = 5
Whole = dict[str, Tensor]


def alone(base: Path) -> list[float]:
    """The same training, by torch in one process."""
    model = LlamaForCausalLM.from_pretrained(base)
    return loop.train(model, [torch.optim.AdamW(model.parameters(), lr=1e-3)], STEPS)


def tuned(rank: int, size: int, base: Path, out: Path, tp: int, int8: bool) -> list[float]:
    return full.tune(base, out, steps=STEPS, tp=tp, int8=int8)


@pytest.mark.parametrize(
    ("size", "tp", "int8", "tolerance"),
    [(4, 2, True, 0.01), (2, 1, True, 0.01), (4, 2, False, 1e-5), (2, 2, False, 1e-5)],
)
def test_ranks_train_as_one_process(
    request: pytest.FixtureRequest, base: Path, tmp_path: Path, size: int, tp: int, int8: bool,
    tolerance: float,
) -> None:  # fmt: skip
    """8-bit parameters within the 0.01 nats that polyshard-quantized states; else within 1e-5."""
    world: World = request.getfixturevalue(f"world{size}")
    runs = world.run(tuned, base, tmp_path, tp, int8, timeout=200.0)
    assert all(losses == runs[0] for losses in runs)
    expected = alone(base)
    assert runs[0] == pytest.approx(expected, abs=tolerance)
    assert expected[-1] < expected[0] - 1, "nothing was learnt"


def exported(rank: int, size: int, base: Path, out: Path, settings: dict[str, Any]) -> Whole:
    """A step of training, then the model twice: in files, and gathered by torch."""
    mesh = llama.meshes(2)
    model = llama.load(base, mesh)
    loop.train(model, [torch.optim.AdamW(model.parameters(), lr=1e-3)], 1, mesh["dp"])
    llama.export(model, out, **settings)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "vocab_size": 261}])
@pytest.mark.parametrize(
    "settings", [{}, {"file_bytes": 1_000_000}, {"dtype": torch.bfloat16}], ids=str
)
def test_transformers_loads_what_was_exported(
    world4: World, tmp_path: Path, changes: dict[str, Any], settings: dict[str, Any]
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    llama.begin(base, **changes)
    gathered = world4.run(exported, base, out, settings, timeout=200.0)[0]
    loaded, messages = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(messages.values()), messages
    dtype = settings.get("dtype", torch.float32)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    expected = LlamaForCausalLM(llama.config(**changes)).eval()
    expected.load_state_dict(gathered)
    for parameter in expected.parameters():  # not buffers, which stay in fp32
        parameter.data = parameter.data.to(dtype)
    tokens = corpus.batch(99)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, expected(tokens).logits)
    prompt = corpus.tokens_of("The ")
    written = expected.generate(prompt, max_new_tokens=20, do_sample=False)
    assert completion.complete(out, "The ", tokens=20) == corpus.text_of(written)
    assert (out / "model.safetensors.index.json").exists() == ("file_bytes" in settings)
    assert loaded.generation_config.eos_token_id == 257


def generated(rank: int, size: int, base: Path) -> str:
    model = llama.load(base, llama.meshes(2)).eval()
    prompt = corpus.tokens_of("The ")
    with torch.no_grad():
        return corpus.text_of(model.generate(prompt, max_new_tokens=20, do_sample=False))


def test_a_sharded_model_writes_what_the_whole_one_writes(world4: World, base: Path) -> None:
    texts = world4.run(generated, base, timeout=200.0)
    assert set(texts) == {completion.complete(base, "The ", tokens=20)}


def test_fewer_key_heads_than_ranks_are_refused(world4: World, base: Path, tmp_path: Path) -> None:
    said = r"layers\.0\.self_attn\.k_proj' makes 2 heads of 32.* over 4 ranks"
    with pytest.raises(RankError, match=said):
        world4.run(tuned, base, tmp_path, 4, False)


def gathered_of(rank: int, size: int, base: Path) -> Whole:
    model = llama.load(base, llama.meshes(2))
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def test_a_base_in_bfloat16_is_trained_in_float32(world4: World, tmp_path: Path) -> None:
    """As most are published; the config says so, and the values are the same."""
    whole = LlamaForCausalLM(llama.config()).to(torch.bfloat16)
    whole.save_pretrained(tmp_path)
    found = world4.run(gathered_of, tmp_path, timeout=200.0)[0]
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert all(
        torch.equal(value, found[name].bfloat16()) for name, value in whole.state_dict().items()
    )


def test_the_scripts_are_commands(tmp_path: Path) -> None:
    """As the page shows them, with two steps."""
    base, out = str(tmp_path / "base"), str(tmp_path / "out")
    command("llama.py", base)
    printed = command("full.py", base, out, "--steps", "2")
    assert [line.split()[:2] for line in printed.splitlines()] == [["step", "0"], ["step", "1"]]
    assert command("completion.py", out, "The ").startswith("The ")


def command(script: str, *arguments: str) -> str:
    """What a script prints."""
    path = str(Path(llama.__file__).with_name(script))
    done = subprocess.run(
        [sys.executable, path, *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
