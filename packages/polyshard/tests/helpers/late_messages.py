"""Messages that arrive when they are waited for and not before: one rank, whose peers are as it is.

What is received holds no number until then, and what is sent is compared with what it was when it
was posted. So a wait that is missing shows, whatever the machine is doing meanwhile.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from polyshard._torch.recording import GroupBase, WorkBase, registered_name
from polyshard.transport.gloo import GlooTransport

BACKEND = "late"
Program = Callable[["Mail"], None]


class Mail:
    """Everything that is under way."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.under_way: dict[int, str] = {}
        self.posted: defaultdict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.answer_with: Callable[[Tensor], Tensor] = lambda own: own

    def begin(self, what: str) -> int:
        number = len(self.problems) + len(self.under_way) + sum(map(len, self.posted.values()))
        while number in self.under_way:
            number += 1
        self.under_way[number] = what
        return number


class LateWork(WorkBase):  # type: ignore[misc]
    """One message."""

    def __init__(self, mail: Mail, what: str, end: Callable[[], object]) -> None:
        super().__init__()
        self._mail = mail
        self._number = mail.begin(what)
        self._end = end

    def wait(self, timeout: object = None) -> bool:
        del timeout
        if self._mail.under_way.pop(self._number, None) is not None:
            self._end()
        return True


class LateGroup(GroupBase):  # type: ignore[misc]
    """A process group of one real rank."""

    def __init__(self, rank: int, size: int, mail: Mail) -> None:
        super().__init__(rank, size)
        self._mail = mail

    @property
    def group_name(self) -> str:
        return registered_name(self)

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> LateWork:
        (tensor,) = tensors
        before = tensor.clone()
        self._mail.posted[peer, tag].append(before)

        def end() -> None:
            if not torch.equal(_bits(tensor), _bits(before)):
                self._mail.problems.append(f"a message to rank {peer} changed while it was sent")

        return LateWork(self._mail, f"a message to rank {peer}", end)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> LateWork:
        (tensor,) = tensors
        _bits(tensor).fill_(0xFF)  # not a number, in every floating dtype

        def end() -> None:
            queue = self._mail.posted[peer, tag]
            sent = self._mail.answer_with(queue.popleft()) if queue else torch.zeros(())
            tensor.zero_()
            count = min(tensor.numel(), sent.numel())
            tensor.view(-1)[:count].copy_(sent.reshape(-1)[:count])

        return LateWork(self._mail, f"a message from rank {peer}", end)

    def alltoall_base(self, output: Tensor, source: Tensor, *sizes: Any) -> LateWork:
        _bits(output).fill_(0xFF)
        before = source.clone()
        return LateWork(self._mail, "an exchange", lambda: output.copy_(before))

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> LateWork:
        del opts
        return LateWork(self._mail, "a sum", lambda: [t.mul_(self.size()) for t in tensors])

    all_to_all_single = alltoall_base


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def problems_of(program: Program, size: int = 2) -> list[str]:
    """What goes wrong in ``program`` as rank 0: messages that were not awaited, and worse."""
    mail = Mail()

    def create(store: object, rank: int, size: int, timeout: object) -> LateGroup:
        del store, timeout
        return LateGroup(rank, size, mail)

    dist.Backend._plugins.pop(BACKEND.upper(), None)
    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=size)
    try:
        with (
            mock.patch("polyshard.transport.backend_for", return_value="gloo"),
            mock.patch("polyshard.agreement.board.default_store", return_value=None),
            mock.patch.object(GlooTransport, "staging_bytes", 4),
            mock.patch(
                "polyshard.transport.gloo.messages.Thread"
            ),  # dropped messages stay under way
        ):
            program(mail)
    finally:
        dist.destroy_process_group()
    return [*mail.problems, *(f"{what} that nobody waited for" for what in mail.under_way.values())]
