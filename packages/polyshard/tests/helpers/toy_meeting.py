"""Ranks that meet without a collective."""

from __future__ import annotations

import time

from polyshard._torch.private import default_store


def await_all(what: str, size: int) -> None:
    """At the store: a rank that waits in a collective is freed from it when another has failed.

    Groups of such a rank are broken then. ``what`` is met for once in a world.
    """
    store = default_store()
    assert store is not None
    key = f"test/{what}"
    store.add(key, 1)
    while store.add(key, 0) < size:
        time.sleep(0.01)
