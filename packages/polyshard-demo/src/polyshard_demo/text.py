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

__all__ = ["Batches", "Corpus", "load_corpus"]

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
        counts = torch.bincount(_as_tensor(self.content).long(), minlength=256).double()
        shares = counts[counts > 0] / len(self.content)
        return float(-(shares * shares.log()).sum())

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that identify the text."""
        return hashlib.sha256(self.content).hexdigest()[:16]


@dataclass(frozen=True)
class Batches:
    """One part of every batch, as a pure function of seed and step.

    The rows of a step's global batch depend on nothing but the seed and the step. Part ``r`` of
    ``world_size`` has the ``r``-th block of them, so any number of parts that divides the batch
    trains on the same rows, and to resume at a step needs no saved state.
    """

    corpus: Corpus
    batch: int  # rows per step, over all parts and micro-batches
    sequence: int  # bytes per row
    seed: int  # decides the rows
    rank: int  # this part; mostly that of the rank with this number
    world_size: int  # number of parts; divides the batch

    def starts(self, step: int) -> list[int]:
        """Offsets, in bytes, of all rows of the global batch at a step."""
        source = random.Random(f"{self.seed}/{step}")
        count = len(self.corpus.train) - self.sequence
        return [source.randrange(count) for _ in range(self.batch)]

    def micro_batches(self, step: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """This part's `count` micro-batches of a step.

        Returns:
            Pairs of inputs and targets, each int64, shape (batch / world_size / count, sequence);
            a target is the byte after its input.
        """
        rows = self._rows(self.corpus.train, self.starts(step), self.rank)
        return [(part[:, :-1], part[:, 1:]) for part in rows.chunk(count)]

    def held_out(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This part's share of `count` fixed batches spread evenly over the held-out text."""
        text, total = self.corpus.held_out, count * self.batch
        last = len(text) - self.sequence - 1
        starts = [index * last // max(1, total - 1) for index in range(total)]
        for piece in range(self.rank, count * self.world_size, self.world_size):
            rows = self._rows(text, starts, piece)
            yield rows[:, :-1], rows[:, 1:]

    def _rows(self, text: Tensor, starts: Sequence[int], piece: int) -> Tensor:
        """One of the equal pieces of rows that start so, int64, shape (rows, sequence + 1)."""
        share = self.batch // self.world_size
        own = starts[piece * share : (piece + 1) * share]
        return torch.stack([text[start : start + self.sequence + 1] for start in own]).long()


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
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES and f.is_file())
    elif not path.is_file():
        raise DemoError(f"--text {path} does not exist; give a text file or a directory")
    if not files:
        raise DemoError(f"--text {path} holds no {', '.join('*' + end for end in SUFFIXES)} file")
    try:
        return Corpus(path.name, b"\n".join(file.read_bytes() for file in files))
    except OSError as error:
        raise DemoError(f"cannot read --text {error.filename}: {error.strerror}") from error


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
