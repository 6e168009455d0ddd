"""Random numbers that go by step and slot: which rank runs a slot changes none of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(*keys: int | str) -> int:
    """A seed for ``keys``, the same on every machine; others give others."""
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits on every device


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Put torch's generators back afterwards: what a rank drew in its slots is its own affair."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        yield
