"""The demo's language model against naive arithmetic."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polyshard_demo.model import PRESETS, Attention, LanguageModel, ModelSettings, Rotary

TINY = PRESETS["tiny"]


def turned_by_hand(vector: Tensor, position: int) -> Tensor:
    """Rotary turn of one head vector (K,) with complex numbers, pair by pair."""
    half = len(vector) // 2
    result = vector.clone()
    for pair in range(half):
        angle = position * 10000.0 ** (-pair / half)
        number = complex(vector[pair], vector[pair + half])
        number *= complex(math.cos(angle), math.sin(angle))
        result[pair], result[pair + half] = number.real, number.imag
    return result


def attended_by_hand(attention: Attention, hidden: Tensor) -> Tensor:
    """Attention over one sequence (T, D), row by row in float64."""
    width = attention.head_width
    query, key, value = (
        hidden @ projection.weight.double().T
        for projection in (attention.query, attention.key, attention.value)
    )
    rows = torch.zeros_like(hidden)
    for head in range(hidden.shape[1] // width):
        part = slice(head * width, (head + 1) * width)
        keys = [turned_by_hand(row, position) for position, row in enumerate(key[:, part])]
        for position, row in enumerate(query[:, part]):
            own = turned_by_hand(row, position)
            scores = torch.stack([own @ keys[past] for past in range(position + 1)])
            weights = (scores / math.sqrt(width)).softmax(0)
            rows[position, part] = weights @ value[: position + 1, part]
    return rows @ attention.output.weight.double().T


def test_rotary_attention_equals_the_naive_one() -> None:
    torch.manual_seed(0)
    attention = Attention(TINY)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.mul_(10)  # scores of order one
        hidden = torch.randn(3, 12, TINY.width)
        found = attention(hidden)
        expected = torch.stack([attended_by_hand(attention, row) for row in hidden.double()])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_rotary_keeps_lengths_and_depends_on_distance_alone() -> None:
    rotary = Rotary(head_width=8, sequence=32)
    query, key = torch.randn(2, 8, dtype=torch.float64).float()
    turned = rotary(torch.stack([query, key]).view(1, 2, 1, 8).expand(1, 2, 32, 8))
    torch.testing.assert_close(turned[0, 0].norm(dim=-1), query.norm().expand(32))
    products = turned[0, 0] @ turned[0, 1].T
    torch.testing.assert_close(products[5, 2], products[20, 17], rtol=1e-4, atol=1e-5)


def test_future_bytes_do_not_matter() -> None:
    torch.manual_seed(0)
    model = LanguageModel(TINY)
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 10] += 1
    changed %= 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10], after[:, 10])


def test_untrained_model_guesses_evenly() -> None:
    torch.manual_seed(0)
    logits = LanguageModel(TINY)(torch.randint(256, (4, 32)))
    assert logits.shape == (4, 32, 256)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    assert float(entropy.detach()) == pytest.approx(math.log(256), abs=0.05)


@pytest.mark.parametrize("tied", [False, True])
def test_meta_init_fills_everything(tied: bool) -> None:
    settings = ModelSettings(width=32, layers=2, heads=2, hidden=96, tied=tied)
    torch.manual_seed(3)
    direct = LanguageModel(settings)
    with torch.device("meta"):
        late = LanguageModel(settings)
    late.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in late.modules():
        if reset := getattr(module, "reset_parameters", None):
            reset()
    drawn_twice = {"embedding.weight"} if tied else set()
    for name, parameter in direct.named_parameters():
        found = late.get_parameter(name)
        assert float(found.detach().std()) == pytest.approx(
            float(parameter.detach().std()), rel=0.05
        )
        assert name in drawn_twice or torch.equal(found, parameter), name
    for name, buffer in direct.named_buffers():
        assert torch.equal(late.get_buffer(name), buffer), name
    assert (late.head.weight is late.embedding.weight) is tied


def test_without_dropout_nothing_is_drawn() -> None:
    torch.manual_seed(0)
    model = LanguageModel(TINY).train()
    before, tokens = torch.get_rng_state(), torch.arange(16)[None]
    found = model(tokens)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.eval()(tokens), found)


def test_dropout_leaves_out_a_share_of_what_blocks_add() -> None:
    torch.manual_seed(0)
    plain, model = LanguageModel(TINY), LanguageModel(replace(TINY, dropout=0.25))
    model.load_state_dict(plain.state_dict())
    tokens = torch.randint(256, (4, 16))
    assert torch.equal(model.eval()(tokens), plain(tokens))
    added = torch.ones(100_000)
    kept = model.train().blocks[0].dropout(added)  # type: ignore[operator]
    assert kept.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float((kept == 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert not torch.equal(model(tokens), plain(tokens))


def test_odd_head_width_is_refused() -> None:
    with pytest.raises(ValueError, match="heads 2 x an even number"):
        ModelSettings(width=30, layers=1, heads=2, hidden=8)
