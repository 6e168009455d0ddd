"""The store holds as many keys after a thousand failures as after a few."""

from __future__ import annotations

import torch.distributed as dist

from polyshard_resilience.alarm.cuts import KEPT, Epochs


def test_old_reports_are_forgotten_and_never_taken_for_free() -> None:
    store, epochs = dist.HashStore(), Epochs("alarm")
    keys = []
    for epoch in range(5 * KEPT):
        assert epochs.first_free(store, epoch) == epoch
        assert epochs.end(store, epoch, f"report {epoch}") == f"report {epoch}"
        assert epochs.end(store, epoch, "a later one") == f"report {epoch}"
        store.set(epochs.detail(epoch), "detail")
        keys.append(store.num_keys())
    assert set(keys[2 * KEPT :]) == {keys[-1]}
    for late in range(5 * KEPT):
        assert epochs.first_free(store, late) == 5 * KEPT
    assert epochs.first_free(store, 5 * KEPT + 3) == 5 * KEPT + 3


def test_who_was_away_changes_nothing_for_the_others() -> None:
    store, epochs = dist.HashStore(), Epochs("alarm")
    for epoch in range(3 * KEPT):
        epochs.end(store, epoch, "report")
    epochs.end(store, 1, "late")
    assert epochs.first_free(store, 2) == 3 * KEPT


def test_a_rank_that_looked_too_late_hears_the_newest_report() -> None:
    """One that fails in an attempt tells the others again and again until they vote."""
    store, epochs = dist.HashStore(), Epochs("alarm")
    for epoch in range(KEPT + 1):
        assert epochs.told(store, epoch) is None
        epochs.end(store, epoch, f"report {epoch}")
        assert epochs.told(store, epoch) == f"report {epoch}"
    assert epochs.told(store, 0) == f"report {KEPT}"
    assert epochs.told(store, KEPT + 1) is None
