"""Models that are published, receivers in processes of their own, and what is expected of both."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from polyshard import fully_shard
from polyshard_publish import Receiver, ReceiverServer


class Small(nn.Module):
    """A few of everything: dims that no number of ranks divides, ties, buffers, frozen, empty."""

    def __init__(self, width: int = 37) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Linear(width, 3).requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.randn(5, 3, dtype=torch.float64))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.head(self.norm(x)) * self.scale
        found: Tensor = out + self.frozen(x).sum() + self.empty.sum()
        return found


def small(mesh: Any = None, seed: int = 0) -> Any:
    """The same values on every rank; whole without ranks, each block a unit with them."""
    torch.manual_seed(seed)
    model: Any = Small()
    if torch.distributed.is_initialized():
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params={model.scale, model.empty})
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(11).view(1, 11)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def full(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor, whole, by one gather each: what a receiver must have."""
    state = model.state_dict()
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in state.items()
    }


def rounded(state: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {n: t.to(dtype) if dtype and t.is_floating_point() else t for n, t in state.items()}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also where they are no numbers, or zeros of two signs."""
    same = one.dtype == other.dtype and one.shape == other.shape
    mine, theirs = (t.contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return same and torch.equal(mine, theirs)


@contextmanager
def receiving(receiver: Receiver | None = None) -> Iterator[tuple[Receiver, str]]:
    """A receiver in this process, and its address."""
    with ReceiverServer(receiver or Receiver()) as server:
        yield server.receiver, server.address


def serve(pipe: Connection, port: int) -> None:
    """A process that holds a receiver: says its address, then the state of what it serves."""
    torch.set_num_threads(1)
    receiver = Receiver()
    with ReceiverServer(receiver, port=port) as server:
        pipe.send(server.address)
        while True:
            try:
                asked = pipe.recv()
            except EOFError:
                return
            if receiver.have.version is None:
                pipe.send((None, {}))
                continue
            with receiver.serving() as served:
                found = {n: t.clone() for n, t in served.tensors.items()} if asked else {}
                pipe.send((served.version, found))


class Generator:
    """A receiver in a process that may be killed, and started again at the same address.

    Its port stays bound here, so that no other program is given it meanwhile. A socket that does
    not listen is sent no connections.
    """

    def __init__(self) -> None:
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.start()

    def start(self) -> None:
        """A receiver that has nothing yet."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.tensor", "polyshard_publish"])
        self._pipe, theirs = context.Pipe()
        port = self._reserved.getsockname()[1]
        self.process = context.Process(target=serve, args=(theirs, port), daemon=True)
        self.process.start()
        theirs.close()
        self.address: str = self._pipe.recv()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reserved.close()

    def serves(self) -> tuple[int | None, dict[str, Tensor]]:
        """The version, and a copy of its tensors."""
        self._pipe.send(True)
        found: tuple[int | None, dict[str, Tensor]] = self._pipe.recv()
        return found

    def kill(self) -> None:
        """End it, at any point; :meth:`start` begins anew."""
        self.process.kill()
        self.process.join()
        self._pipe.close()
