"""Models of transformers, loaded, trained, saved, loaded at another number of ranks, and asked.

One process with transformers alone is the oracle of all of it. With POLYSHARD_RECORD set to
``docs/reference/architectures.json`` and ``--thorough`` what is found goes into that file, and by
``python tools/write_pages.py`` onto its page.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install transformers")

import torch
import transformers
from pretrained_models import ARCHITECTURES, Architecture, shard, train, values
from torch import Tensor

from polyshard_checkpoint import load_pretrained, save_pretrained
from polyshard_testing import World

SAMPLE = ("Qwen3", "Mixtral", "Whisper")
"""What the gate runs: ties, conversions, and what is neither text nor a single stack of blocks."""


def chosen() -> list[Any]:
    return [
        pytest.param(each, id=name, marks=() if name in SAMPLE else pytest.mark.thorough)
        for name, each in ARCHITECTURES.items()
    ]


def weights_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors*")}


def tuned(
    rank: int, size: int, architecture: Architecture, base: Path, out: Path
) -> tuple[list[float], dict[str, Tensor]]:
    model = shard(architecture.on_meta(base))
    load_pretrained(model, base)
    losses = train(model, architecture, rank, size)
    save_pretrained(model, out)
    return losses, values(model)


def asked(rank: int, size: int, architecture: Architecture, out: Path) -> Tensor:
    model = shard(architecture.on_meta(out))
    load_pretrained(model, out)
    return architecture.answer(model)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("architecture", chosen())
@pytest.mark.filterwarnings("ignore")
def test_it_is_what_one_process_makes_of_it(
    architecture: Architecture, world2: World, world3: World, tmp_path: Path
) -> None:
    base, out, again = tmp_path / "base", tmp_path / "out", tmp_path / "again"
    architecture.build().save_pretrained(base)
    alone: Any = type(architecture.build()).from_pretrained(base)
    expected = torch.tensor(train(alone, architecture))
    found = world2.run(tuned, architecture, base, out, timeout=200.0)
    losses = torch.tensor([each for each, _ in found]).mean(0)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    weights = found[0][1]
    for name, value in values(alone).items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4, msg=name)
    loaded = type(alone).from_pretrained(out)
    loaded.save_pretrained(again)
    assert weights_of(out) == weights_of(again)
    assert (out / "config.json").read_text() == (again / "config.json").read_text()
    answers = world3.run(asked, architecture, out, timeout=200.0)
    answer = architecture.answer(loaded)
    for each in answers:
        torch.testing.assert_close(each, answer, rtol=1e-5, atol=1e-6)
    record(
        architecture,
        {
            "class": architecture.model,
            "parameters": sum(p.numel() for p in alone.parameters()),
            "losses": float(((losses - expected) / expected).abs().max()),
            "weights": max(float((weights[n] - v).abs().max()) for n, v in values(alone).items()),
            "files": len(weights_of(out)),
            "answers": max(float((each - answer).abs().max()) for each in answers),
            "transformers": transformers.__version__,
        },
    )


def record(architecture: Architecture, found: dict[str, Any]) -> None:
    if place := os.environ.get("POLYSHARD_RECORD"):
        path = Path(place)
        every = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(every | {architecture.name: found}, indent=1) + "\n")
