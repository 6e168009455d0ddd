"""A store that counts what it is asked."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class CountingStore:
    """Counts requests of those that it is not told to overlook."""

    def __init__(self) -> None:
        self.inner = dist.HashStore()
        self.inner.set_timeout(timedelta(seconds=60))
        self.counts: Counter[str] = Counter()
        self.is_counting = False
        self.lock = threading.Lock()

    @property
    def timeout(self) -> timedelta:
        return self.inner.timeout  # type: ignore[attr-defined, no-any-return]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.inner, name)

        def counted(key: str | list[str], *args: Any) -> Any:
            with self.lock:
                self.counts[name] += self.is_counting
            return method(key, *args)

        return counted
