"""The text of the demo: split, entropy, batches, and what it refuses."""

import math
from pathlib import Path

import pytest
import torch

from polyshard_demo.errors import DemoError
from polyshard_demo.text import Batches, Corpus, load_corpus

ALPHABET = Corpus("alphabet", bytes(range(200)) * 5)


def batches(rank: int = 0, world_size: int = 1, seed: int = 0) -> Batches:
    return Batches(ALPHABET, 8, 16, seed, rank, world_size)


@pytest.mark.parametrize(
    ("content", "entropy"),
    [
        (b"aaaa", 0.0),
        (b"abab", math.log(2)),
        (b"aaab", 0.75 * math.log(4 / 3) + 0.25 * math.log(4)),
        (bytes(range(256)), math.log(256)),
    ],
)
def test_entropy_by_hand(content: bytes, entropy: float) -> None:
    assert Corpus("", content).entropy == pytest.approx(entropy, abs=1e-12)


def test_last_tenth_is_held_out() -> None:
    corpus = Corpus("digits", b"0123456789" * 10 + b"xyz")
    assert bytes(corpus.train.tolist()) == b"0123456789" * 9 + b"012"
    assert bytes(corpus.held_out.tolist()) == b"3456789xyz"


def test_targets_are_the_next_bytes() -> None:
    ((inputs, targets),) = batches().micro_batches(step=3, count=1)
    assert inputs.shape == targets.shape == (8, 16)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets, (inputs + 1) % 200)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("step", [1, 100_000])
def test_global_batch_is_the_same_at_any_world_size(world_size: int, step: int) -> None:
    ((whole, _),) = batches().micro_batches(step, 1)
    parts = [batches(rank, world_size).micro_batches(step, 1)[0][0] for rank in range(world_size)]
    assert torch.equal(torch.cat(parts), whole)


def test_micro_batches_split_the_ranks_rows() -> None:
    ((whole, _),) = batches(1, 2).micro_batches(7, 1)
    parts = batches(1, 2).micro_batches(7, 4)
    assert [len(inputs) for inputs, _ in parts] == [1, 1, 1, 1]
    assert torch.equal(torch.cat([inputs for inputs, _ in parts]), whole)


def test_batches_depend_on_seed_and_step_alone() -> None:
    assert batches().starts(5) == batches().starts(5)
    assert batches().starts(5) != batches().starts(6)
    assert batches().starts(5) != batches(seed=1).starts(5)


def test_held_out_windows_cover_first_and_last_byte_at_any_world_size() -> None:
    whole = list(batches().held_out(2))
    assert [inputs.shape for inputs, _ in whole] == [(8, 16)] * 2
    assert whole[0][0][0, 0] == ALPHABET.held_out[0]
    assert whole[-1][1][-1, -1] == ALPHABET.held_out[-1]
    halves = [list(batches(rank, 2).held_out(2)) for rank in range(2)]
    for index, (inputs, _) in enumerate(whole):
        assert torch.equal(torch.cat([half[index][0] for half in halves]), inputs)


def test_default_is_pythons_documentation() -> None:
    corpus = load_corpus(None, sequence=128)
    assert b"with" in corpus.content
    assert len(corpus.content) > 100_000
    assert 2.0 < corpus.entropy < 4.0


def test_directory_joins_its_texts_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("B" * 100)
    (tmp_path / "a.txt").write_text("A" * 100)
    (tmp_path / "c.py").write_text("C" * 100)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "d.rst").write_text("D" * 100)
    content = load_corpus(tmp_path, sequence=8).content
    assert content == b"A" * 100 + b"\n" + b"B" * 100 + b"\n" + b"D" * 100


def test_refusals_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="nowhere does not exist"):
        load_corpus(tmp_path / "nowhere", sequence=8)
    with pytest.raises(DemoError, match=r"holds no \*.txt, \*.md, \*.rst"):
        load_corpus(tmp_path, sequence=8)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DemoError, match="has 0 bytes; rows of 8 bytes need at least 100"):
        load_corpus(tmp_path / "empty.txt", sequence=8)
