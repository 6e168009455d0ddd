"""Meetings to compare plans: every order of coming, failing, giving up and trying again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toy_codecs import BytesGather, Codecs, GatherFactory, OtherCodec
from toy_meeting import await_all
from toy_models import build, loss_of, shard, tokens_for

from polyshard import describe, fully_shard, hookimpl
from polyshard.agreement import meeting
from polyshard.agreement.board import Board
from polyshard.agreement.meeting import meet, report_failure, reporting, start_again
from polyshard.errors import PlanMismatchError, SettingError
from polyshard_testing import ranks

SECONDS = 10.0


class Table:
    """Ranks as threads around one store; each keeps its own note of what it reported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 2) -> None:
        self.store = dist.HashStore()
        self.store.set_timeout(timedelta(seconds=SECONDS))
        ranks = tuple(range(size))
        self.boards = [Board(self.store, "table", rank, ranks) for rank in ranks]
        self.threads = [ThreadPoolExecutor(1) for _ in ranks]
        current: dict[int, Board] = {}
        for rank, thread in enumerate(self.threads):
            thread.submit(self._seat, current, rank).result(SECONDS)
        self._current = current

        def board_of_this_thread(ranks: Sequence[int]) -> Board:
            import threading

            return current[threading.get_ident()]

        monkeypatch.setattr(meeting, "open_board", board_of_this_thread)

    def _seat(self, current: dict[int, Board], rank: int) -> None:
        import threading

        current[threading.get_ident()] = self.boards[rank]

    def do(self, rank: int, act: Callable[[], Any]) -> Future[Any]:
        return self.threads[rank].submit(act)

    def comes(self, rank: int, *lines: str, **notes: str) -> Future[Any]:
        def act() -> dict[str, list[int]]:
            start_again()
            return meet(self.boards[rank], lines, notes=notes)

        return self.do(rank, act)

    def fails(self, rank: int, text: str = "no room") -> None:
        ranks = self.boards[rank].ranks
        self.do(rank, lambda: report_failure(lambda: [ranks], OSError(text))).result(SECONDS)

    def starts(self, rank: int) -> None:
        self.do(rank, start_again).result(SECONDS)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    made = Table(monkeypatch)
    yield made
    for thread in made.threads:
        thread.shutdown()


def refused(coming: Future[Any], pattern: str) -> None:
    with pytest.raises(PlanMismatchError, match=pattern):
        coming.result(SECONDS)


def waits(coming: Future[Any]) -> None:
    with pytest.raises(TimeoutError):
        coming.result(2 * meeting.GRACE_SECONDS)


def test_equal_plans_meet_again_and_again(table: Table) -> None:
    for _ in range(3):
        first, second = table.comes(0, "a"), table.comes(1, "a")
        first.result(SECONDS)
        second.result(SECONDS)


def test_a_difference_is_refused_until_it_is_mended(table: Table) -> None:
    for _ in range(3):
        first, second = table.comes(0, "same", "a"), table.comes(1, "same", "b")
        for coming in (first, second):
            refused(coming, r"rank 0 \(-\) against ranks \[1\] \(\+\):\n-a\n\+b")
    first, second = table.comes(0, "same", "b"), table.comes(1, "same", "b")
    first.result(SECONDS)
    second.result(SECONDS)


def test_notes_that_differ_are_told_and_refuse_nothing(table: Table) -> None:
    for _ in range(2):
        first, second = table.comes(0, "a", x="1", y="2", z="3"), table.comes(1, "a", x="1", y="5")
        for coming in (first, second):
            assert coming.result(SECONDS) == {"y": [0, 1]}
    first, second = table.comes(0, "a", x="1"), table.comes(1, "a")
    for coming in (first, second):  # only one of them says anything
        assert coming.result(SECONDS) == {}
    first, second = table.comes(0, "a", x="1"), table.comes(1, "b", x="2")
    for coming in (first, second):
        refused(coming, r"rank 0 \(-\) against ranks \[1\] \(\+\):\n-a\n\+b")


def test_of_many_notes_some_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference in what must be equal is refused however many notes there are."""
    size = meeting.COMPARED_NOTES + 3
    table = Table(monkeypatch, size)
    coming = [table.comes(rank, "a", x=str(rank)) for rank in range(size)]
    first = [c.result(SECONDS) for c in coming]
    assert first == [{"x": list(range(meeting.COMPARED_NOTES))}] * size
    coming = [table.comes(rank, "ab"[rank == size - 1], x=str(rank)) for rank in range(size)]
    for each in coming:
        refused(each, "ranks planned different things")
    for thread in table.threads:
        thread.shutdown()


def test_a_failure_is_quoted_without_a_timeout_and_at_every_attempt(table: Table) -> None:
    table.fails(1)
    for _ in range(3):
        begin = time.monotonic()
        refused(table.comes(0, "a"), "^rank 1 failed while planning: OSError: no room$")
        assert time.monotonic() - begin < SECONDS / 2
    waiting = table.comes(1, "a")  # knows that it failed: no error of its own
    table.comes(0, "a").result(SECONDS)
    waiting.result(SECONDS)


def test_a_rank_that_starts_again_may_take_its_time(table: Table) -> None:
    table.fails(1)
    table.starts(1)
    first = table.comes(0, "a")
    waits(first)
    table.comes(1, "a").result(SECONDS)
    first.result(SECONDS)


def test_a_rank_may_fail_while_another_waits(table: Table) -> None:
    first = table.comes(0, "a")
    waits(first)
    table.fails(1, "late")
    refused(first, "rank 1 failed while planning: OSError: late")


def test_failures_that_all_caught_are_forgotten(table: Table) -> None:
    """A rank that is slow to recover from what all were told is waited for."""
    for _ in range(2):
        table.fails(0)
        table.fails(1)
        first = table.comes(0, "a")
        waits(first)
        table.comes(1, "a").result(SECONDS)
        first.result(SECONDS)


def test_a_second_failure_is_not_one_that_all_caught(table: Table) -> None:
    table.fails(0)
    table.fails(1)
    first = table.comes(0, "a")
    waits(first)
    table.fails(1, "once more")
    refused(first, "OSError: once more")


def test_those_who_come_late_are_told_what_those_who_waited_were(table: Table) -> None:
    """And then all are at the same meeting again."""
    table.store.set_timeout(timedelta(seconds=0.5))
    pattern = r"ranks \[1\] of \[0, 1\] did not reach the meeting within 0 s \(rank 0 did\)"
    refused(table.comes(0, "a"), pattern)
    table.store.set_timeout(timedelta(seconds=SECONDS))
    refused(table.comes(1, "a"), pattern)
    first, second = table.comes(0, "a"), table.comes(1, "a")
    first.result(SECONDS)
    second.result(SECONDS)


def test_all_ranks_see_every_kind_of_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(monkeypatch, size=4)
    coming = [table.comes(rank, line) for rank, line in enumerate("abba")]
    for one in coming:
        refused(one, r"rank 0 \(-\) against ranks \[1, 2\] \(\+\):\n-a\n\+b")


def has_met(coming: Future[Any]) -> bool:
    """Whether a rank has met all others; it is refused or waits else."""
    if coming.done() and coming.exception() is not None:
        assert isinstance(coming.exception(), PlanMismatchError)
        return False
    return coming.done()


events = st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=5)


@settings(max_examples=25, deadline=None)
@given(events)
def test_whatever_happened_all_start_in_the_end(history: list[tuple[int, bool]]) -> None:
    """Ranks fail, or come alone and are refused or left waiting; then all try until all meet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "GRACE_SECONDS", 0.02)
        patch.setattr(meeting, "LOOK_SECONDS", 0.005)
        patch.setattr(meeting, "POLL_SECONDS", 0.001)
        table = Table(patch, size=3)
        waiting: dict[int, Future[Any]] = {}
        for rank, fails in history:
            if rank in waiting and not waiting[rank].done():
                continue
            if fails:
                table.fails(rank)
                continue
            waiting[rank] = table.comes(rank, "a")
        deadline = time.monotonic() + 6 * SECONDS
        while not (len(waiting) == 3 and all(map(has_met, waiting.values()))):
            assert time.monotonic() < deadline
            for rank in range(3):
                if rank not in waiting or (waiting[rank].done() and not has_met(waiting[rank])):
                    waiting[rank] = table.comes(rank, "a")
            time.sleep(0.003)
        for thread in table.threads:
            thread.shutdown()


# On real ranks ------------------------------------------------------------------------------------


def test_without_a_store_the_error_itself_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that served it may have ended first, and its store with it."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", server.port, wait_for_workers=False)
    monkeypatch.setattr(meeting, "open_board", lambda ranks: Board(client, "test", 0, (0, 1)))
    client.set("reached", "yes")
    del server
    with pytest.raises(OSError, match="no room") as caught, reporting(lambda: [(0, 1)]):
        raise OSError("no room")
    (note,) = caught.value.__notes__
    assert note.startswith("other ranks could not be told: Dist")


@ranks(2)
def test_a_mismatch_is_refused_at_every_forward_until_it_is_mended(rank: int, size: int) -> None:
    """Raised at every forward; one rank repaired is not enough unless it makes plans agree."""
    x = tokens_for(0, rank)
    plugins = [Codecs()] if rank else []
    model: Any = shard(build(), fully_shard, plugins=plugins)
    before = {n: p.full_tensor() for n, p in model.named_parameters()}
    for _ in range(3):
        with pytest.raises(PlanMismatchError, match="nothing was communicated yet"):
            model(x)
        with pytest.raises(PlanMismatchError, match="nothing was communicated yet"):
            model.unshard()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), before[name])
    if rank == 1:  # the other rank keeps its model
        model = shard(build(), fully_shard, plugins=[OtherCodec()])
    with pytest.raises(PlanMismatchError, match=r"\+group .* plugin other 3"):
        model(x)
    if rank == 1:
        model = shard(build(), fully_shard)
    loss = loss_of(model, x)
    assert torch.equal(loss, loss_of(build(), x))
    loss.backward()


@ranks(2)
def test_an_error_that_all_ranks_caught_does_not_spoil_a_later_start(rank: int, size: int) -> None:
    """Every rank meets the same error, catches it, and starts; one is slow."""
    with pytest.raises(SettingError):
        fully_shard(nn.Linear(2, 2), reshard_after_forward=3)
    if rank == 1:
        time.sleep(3 * meeting.GRACE_SECONDS)
    model: Any = fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()


class Brittle(BytesGather):
    """Cannot be bound on rank 1 the first time."""


class BrittleFactory(GatherFactory):
    def __init__(self, failures: list[int]) -> None:
        self.failures = failures

    def bind(self, group: Any, layout: Any) -> BytesGather:
        if dist.get_rank() == 1 and self.failures:
            self.failures.pop()
            raise OSError("no room to bind")
        return super().bind(group, layout)


class Binding(Codecs):
    def __init__(self, failures: int) -> None:
        self.failures = [0] * failures

    @hookimpl
    def polyshard_gather_codec(self, group: object) -> BrittleFactory:
        return BrittleFactory(self.failures)


@ranks(2)
def test_a_plan_that_cannot_be_made_is_heard_of(rank: int, size: int) -> None:
    """A plan that cannot be made at the first forward, then can; also met by describe()."""
    model: Any = fully_shard(nn.Linear(4, 4), plugins=[Binding(3)])
    x = torch.ones(1, 4)
    if rank == 1:
        with pytest.raises(OSError, match="no room to bind"):
            describe(model)  # no rank waits for it
    refusals = []
    while True:
        try:
            loss = model(x).sum()
            break
        except (OSError, PlanMismatchError) as error:
            refusals.append(str(error))
            await_all("refused", size)  # a rank that starts again at once would be waited for
    loss.backward()
    own, others = "no room to bind", "rank 1 failed while planning: OSError: no room to bind"
    whose = "raised by plugin 'codecs' (1.2) in BrittleFactory.bind, its gather codec for group"
    assert set(refusals) == {own if rank else f"{others} ({whose} '(root)')"}
    assert len(refusals) >= 2


@ranks(4)
def test_models_beside_a_mismatched_one_run(rank: int, size: int) -> None:
    """Other models on the same ranks, and on some of them, are not affected."""
    from torch.distributed.device_mesh import init_device_mesh

    x = torch.ones(1, 4)
    bad: Any = fully_shard(nn.Linear(4, 4 + rank))
    good: Any = fully_shard(nn.Linear(4, 4))
    halves = init_device_mesh(
        torch.get_default_device().type, (2, 2), mesh_dim_names=("pair", "member")
    )
    own: Any = fully_shard(nn.Linear(4, 5 + rank // 2), mesh=halves["member"])
    for _ in range(2):
        with pytest.raises(PlanMismatchError, match=r"rank 0 \(-\) against ranks \[1\]"):
            bad(x)
        good(x).sum().backward()
        own(x).sum().backward()
