"""Keys of the store list the ranks and groups that are broken; several ranks write at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from polyshard.agreement.board import Board
from polyshard_resilience.alarm.alarm import Alarm
from polyshard_resilience.alarm.cuts import KEPT, NOTHING_BROKEN, Cuts, Epochs
from polyshard_resilience.alarm.reports import Cause, Report

LATE_SECONDS = 0.3
PATIENT_SECONDS = 30.0


def test_who_has_cut_and_who_has_mended() -> None:
    store, cuts = dist.HashStore(), Cuts("alarm")
    assert cuts.read(store) == NOTHING_BROKEN
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda rank: cuts.add(store, rank), range(32)))
        assert cuts.read(store).cut == set(range(32))
        list(pool.map(lambda rank: cuts.mended(store, rank, []), range(1, 32)))
    assert cuts.read(store).cut == {0}
    keys = store.num_keys()
    cuts.mended(store, 0, [])
    cuts.mended(store, 0, [])
    assert not cuts.read(store)
    cuts.add(store, 3)
    assert cuts.read(store).cut == {3}
    assert store.num_keys() == keys


def test_groups_out_of_step() -> None:
    store, cuts = dist.HashStore(), Cuts("alarm")
    for begun in ({"a/0": 4, "b/0": 7}, {"a/0": 4, "c/1": 1}, {"b/0": 8}, {"c/1": 1}):
        cuts.compare(store, 1, begun)
    broken = cuts.read(store)
    assert broken.apart == {"b/0"}
    assert broken.includes("b/0", [0, 2])
    assert not broken.includes("a/0", [0, 1])
    cuts.add(store, 1)
    assert cuts.read(store).includes("a/0", [0, 1])
    cuts.mended(store, 1, ["b/0"])
    assert not cuts.read(store)
    cuts.compare(store, 2, {"b/0": 8})
    cuts.compare(store, 2, {"b/0": 8})
    assert not cuts.read(store)


def test_the_first_to_ask_says_what_all_repair() -> None:
    store, cuts, key = dist.HashStore(), Cuts("alarm"), Epochs("alarm").repaired(1)
    cuts.add(store, 1)
    cuts.aborted(store, ["a/0", "b/0"])
    first, agreed = cuts.agree(store, key)
    assert first == agreed
    assert agreed.cut == {1}
    cuts.add(store, 2)
    late, agreed = cuts.agree(store, key)
    assert late.cut == {1, 2}
    assert agreed == first


def test_what_was_compared_is_forgotten() -> None:
    store, cuts = dist.HashStore(), Cuts("alarm")
    for epoch in range(4 * KEPT):
        cuts.compare(store, epoch, {"a/0": epoch, "b/0": 1})
        cuts.compare(store, epoch, {"a/0": epoch})
    assert store.num_keys() <= 2 * (KEPT + 1)


def test_those_who_recover_wait_until_all_have_come_to_their_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("polyshard_resilience.alarm.alarm.ACCOUNT_SECONDS", PATIENT_SECONDS)
    store = dist.HashStore()
    failed, other = (Alarm(Board(store, "alarm", rank, (0, 1))) for rank in range(2))
    for alarm in (failed, other):
        alarm.start()
    failed.ring(Report(0, Cause.RAISED, "rank 0 failed"))
    failed.begin_anew()
    failed.ring(Report(0, Cause.RAISED, "rank 0 failed, which it tells again"))
    other.look()
    other.begin_anew()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(other.broken_groups)
        time.sleep(LATE_SECONDS)
        failed.say_cut()
        failed.begin_anew()
        assert failed.epoch == other.epoch == 2
        assert asked.result().cut == failed.broken_groups().cut == {0}
        other.ring(Report(1, Cause.RAISED, "rank 1 failed"))
        other.begin_anew()
        asked = pool.submit(other.broken_groups)
        time.sleep(LATE_SECONDS)
        other.ring(Report(1, Cause.RAISED, "rank 1 failed again"))
        assert asked.result(PATIENT_SECONDS / 2) == NOTHING_BROKEN
    for alarm in (failed, other):
        alarm.courier.close(1.0)
