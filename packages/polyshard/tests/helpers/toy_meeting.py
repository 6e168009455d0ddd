"""Ranks that meet without a collective."""

from __future__ import annotations

import time

from polyshard._torch.private import default_store


def await_all(what: str, size: int) -> None:
    """Return when all ranks have come, as often as each has: before a rank fails or dies.

    At the store: ranks leave a collective one by one, and one that is still in it is freed from
    it with an error when another has failed. Groups of such a rank are broken then.
    """
    store = default_store()
    assert store is not None
    key = f"test/{what}"
    come = store.add(key, 1)
    awaited = -(-come // size) * size
    while store.add(key, 0) < awaited:
        time.sleep(0.01)
