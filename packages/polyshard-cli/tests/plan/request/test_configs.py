"""Configs of transformers with some fields changed: those that follow from others follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyshard_cli.plan import PlanError
from polyshard_cli.plan.request.model import config_of

transformers: Any = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("LlamaConfig", {"num_attention_heads": 64}),
        ("LlamaConfig", {"hidden_size": 8192, "num_attention_heads": 64}),
        ("Qwen3Config", {"num_hidden_layers": 4}),
        ("Gemma3TextConfig", {"num_hidden_layers": 8}),
    ],
)
def test_a_class_is_called_with_the_fields(name: str, overrides: dict[str, object]) -> None:
    expected = getattr(transformers, name)(**overrides)
    assert config_of(name, overrides).to_dict() == expected.to_dict()


def test_a_directory_keeps_what_it_has(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    made = transformers.Qwen3Config(**sizes, num_hidden_layers=6, vocab_size=100)
    made.save_pretrained(str(tmp_path))
    found = config_of(str(tmp_path), {"num_hidden_layers": 2, "num_attention_heads": 8})
    assert (found.vocab_size, found.hidden_size) == (100, 64)
    assert (found.num_hidden_layers, len(found.layer_types)) == (2, 2)
    assert (found.num_attention_heads, found.num_key_value_heads) == (8, 8)


def test_a_refusal_has_its_reason() -> None:
    with pytest.raises(PlanError, match=r"4096.*not a multiple of.*7"):
        config_of("LlamaConfig", {"num_attention_heads": 7})
