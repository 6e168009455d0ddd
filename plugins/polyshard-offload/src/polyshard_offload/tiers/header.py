"""The first page of a swap file: what it is, and how much of which dtype it holds."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist

from polyshard_offload.settings import PAGE_BYTES

FORMAT_VERSION = 2


class Header:
    """What a file says of itself.

    ``plan`` is a hash of all reserved places, in order: equal where shards and state are equal, so
    it tells files of one run from those of another, and even ranks from uneven ones.
    """

    def __init__(self, kind: str, rank: int) -> None:
        """``kind`` is what the file holds."""
        self._kind = kind
        self._rank = rank
        self._plan = hashlib.blake2b(digest_size=8)
        self._dtypes: Counter[str] = Counter()

    def note(self, offset: int, nbytes: int, dtypes: Mapping[torch.dtype, int]) -> None:
        """A place was reserved: first byte, size, and bytes of each dtype in it."""
        held = {str(dtype).removeprefix("torch."): n for dtype, n in dtypes.items()}
        self._dtypes.update(held)
        self._plan.update(json.dumps([offset, nbytes, held], sort_keys=True).encode())

    def text(self) -> bytes:
        """JSON, shorter than a page."""
        facts = {
            "format": f"polyshard-offload swap {FORMAT_VERSION}",
            "holds": self._kind,
            "rank": self._rank,
            "world_size": dist.get_world_size() if dist.is_initialized() else 1,
            "pid": os.getpid(),
            "plan": self._plan.hexdigest(),
            "bytes": dict(sorted(self._dtypes.items())),
        }
        text = json.dumps(facts).encode()
        assert len(text) < PAGE_BYTES
        return text
