"""Muon over ranks against ``torch.optim.Muon`` and AdamW in one process."""

from __future__ import annotations

from pathlib import Path

import llama
import loop
import muon
import pytest
import torch
from transformers import LlamaForCausalLM

from polyshard.testing import World

STEPS = 4


def tuned(rank: int, size: int, base: Path, out: Path, tp: int) -> list[float]:
    return muon.tune(base, out, steps=STEPS, tp=tp)


def alone(base: Path) -> tuple[list[float], LlamaForCausalLM]:
    """torch's own: matrices of the blocks by Muon, the rest by AdamW."""
    model = LlamaForCausalLM.from_pretrained(base)
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=muon.LR_MATRICES),
        torch.optim.AdamW(rest, lr=muon.LR_REST),
    ]
    return loop.train(model, optimizers, STEPS), model


@pytest.mark.parametrize(("size", "tp"), [(2, 1), (4, 2)])
def test_matrices_are_orthogonalized_as_in_one_process(
    request: pytest.FixtureRequest, base: Path, tmp_path: Path, size: int, tp: int
) -> None:
    """Muon computes in bf16, so what sums round differently shows in some bits of its updates."""
    world: World = request.getfixturevalue(f"world{size}")
    runs = world.run(tuned, base, tmp_path, tp, timeout=200.0)
    assert all(losses == runs[0] for losses in runs)
    expected, model = alone(base)
    print(runs[0], expected)
    assert runs[0] == pytest.approx(expected, abs=2e-3)
    assert expected[-1] < expected[0] - 0.5, "nothing was learnt"
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    start = LlamaForCausalLM.from_pretrained(base).state_dict()
    for name, value in model.state_dict().items():
        moved = (value - start[name]).norm()
        difference = (loaded.state_dict()[name] - value).norm()
        print(name, (difference / moved).item())
        assert difference <= 0.05 * moved, name
