"""Byte-level text: where it comes from, its split, its entropy and its batches."""

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from polyshard_demo.errors import DemoError

__all__ = ["Batches", "Corpus", "Windows", "load_corpus", "unigram_entropy"]

SUFFIXES = (".txt", ".md", ".rst")
HELD_OUT_FRACTION = 0.1


@dataclass(frozen=True)
class Corpus:
    """A text as bytes; the last tenth is held out and never trained on."""

    name: str
    content: bytes

    @property
    def split(self) -> int:
        """Offset in bytes where the held-out part begins."""
        return len(self.content) - int(len(self.content) * HELD_OUT_FRACTION)

    @cached_property
    def train(self) -> Tensor:
        """The training part, uint8, shape (bytes,)."""
        return _as_tensor(self.content[: self.split])

    @cached_property
    def held_out(self) -> Tensor:
        """The held-out part, uint8, shape (bytes,)."""
        return _as_tensor(self.content[self.split :])

    @cached_property
    def entropy(self) -> float:
        """Unigram entropy in nats per byte: the loss of the best model without context."""
        return unigram_entropy(self.content)

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that identify the text."""
        return hashlib.sha256(self.content).hexdigest()[:16]


@dataclass(frozen=True)
class Batches:
    """One rank's share of every batch, as a pure function of seed and step.

    The rows of a step's global batch depend on nothing but the seed and the step. Rank ``r`` of
    ``world_size`` takes the ``r``-th block of them, so any world size that divides the batch
    trains on the same rows, and going on at a step needs no saved state.

    Attributes:
        corpus: The text.
        batch: Rows per step, over all ranks and micro-batches.
        sequence: Bytes per row.
        seed: Decides the rows.
        rank: This rank.
        world_size: Number of ranks; divides `batch`.
    """

    corpus: Corpus
    batch: int
    sequence: int
    seed: int
    rank: int
    world_size: int

    def starts(self, step: int) -> list[int]:
        """Offsets, in bytes, of all rows of the global batch at a step."""
        source = random.Random(f"{self.seed}/{step}")
        count = len(self.corpus.train) - self.sequence
        return [source.randrange(count) for _ in range(self.batch)]

    def micro_batches(self, step: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's `count` micro-batches of a step.

        Returns:
            Pairs of inputs and targets, each int64, shape (batch / world_size / count, sequence);
            a target is the byte after its input.
        """
        share = self.batch // self.world_size
        own = self.starts(step)[self.rank * share : (self.rank + 1) * share]
        rows = _rows(self.corpus.train, own, self.sequence)
        return [_pair(part) for part in rows.chunk(count)]

    def held_out(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share of `count` fixed batches spread evenly over the held-out text."""
        share = self.batch // self.world_size
        pieces = range(self.rank, count * self.world_size, self.world_size)
        return Windows(self.corpus, self.sequence).held_out(count * self.batch, share, pieces)


@dataclass(frozen=True)
class Windows:
    """A text as samples with numbers: one after another, each of `sequence` bytes.

    Attributes:
        corpus: The text.
        sequence: Bytes per row.
    """

    corpus: Corpus
    sequence: int

    @property
    def count(self) -> int:
        """How many samples there are to train on."""
        return (len(self.corpus.train) - 1) // self.sequence

    def rows(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of samples, each int64, shape (len(indices), sequence)."""
        starts = [index * self.sequence for index in indices]
        return _pair(_rows(self.corpus.train, starts, self.sequence))

    def held_out(self, total: int, rows: int, pieces: range) -> Iterator[tuple[Tensor, Tensor]]:
        """Some pieces of ``total`` rows that are spread evenly over the held-out text.

        Args:
            total: how many rows there are.
            rows: in each piece.
            pieces: which of them.
        """
        starts = _spread(len(self.corpus.held_out), self.sequence, total)
        for piece in pieces:
            own = starts[piece * rows : (piece + 1) * rows]
            yield _pair(_rows(self.corpus.held_out, own, self.sequence))


def _spread(length: int, sequence: int, total: int) -> list[int]:
    """Offsets, in bytes, of ``total`` rows from the first of a text to its last."""
    last = length - sequence - 1
    return [index * last // max(1, total - 1) for index in range(total)]


def _rows(text: Tensor, starts: Sequence[int], sequence: int) -> Tensor:
    """Rows of text, int64, shape (len(starts), sequence + 1)."""
    return torch.stack([text[start : start + sequence + 1] for start in starts]).long()


def _pair(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets: a target is the byte after its input."""
    return rows[:, :-1], rows[:, 1:]


def load_corpus(path: Path | None, sequence: int) -> Corpus:
    """Read a text, or Python's own documentation when no path is given.

    Args:
        path: A file of any name, or a directory whose ``*.txt``, ``*.md`` and ``*.rst`` files are
            joined in sorted order.
        sequence: Bytes per row that will be cut from it; a shorter text is refused.
    """
    corpus = _python_documentation() if path is None else _read(path)
    needed = math.ceil((sequence + 2) / HELD_OUT_FRACTION)
    if len(corpus.content) < needed:
        raise DemoError(
            f"the text {corpus.name} has {len(corpus.content):,} bytes; rows of {sequence} bytes "
            f"need at least {needed:,}: give a longer --text or a shorter --sequence"
        )
    return corpus


def unigram_entropy(content: bytes) -> float:
    """Entropy of the byte frequencies, in nats per byte."""
    counts = torch.bincount(_as_tensor(content).long(), minlength=256).double()
    shares = counts[counts > 0] / len(content)
    return float(-(shares * shares.log()).sum())


def _python_documentation() -> Corpus:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DemoError(
            "this Python ships without its documentation (pydoc_data.topics); give --text"
        ) from error
    joined = "\n".join(topics[name] for name in sorted(topics))
    return Corpus("pydoc_data.topics", joined.encode())


def _read(path: Path) -> Corpus:
    if path.is_file():
        return Corpus(path.name, _content(path))
    if not path.is_dir():
        raise DemoError(f"--text {path} does not exist; give a text file or a directory")
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise DemoError(f"--text {path} holds no {', '.join('*' + end for end in SUFFIXES)} file")
    return Corpus(path.name, b"\n".join(_content(file) for file in files))


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise DemoError(f"cannot read --text {file}: {error.strerror}") from error


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
