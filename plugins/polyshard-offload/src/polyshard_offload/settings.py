"""What a user chooses, checked when it is chosen."""

from __future__ import annotations

import mmap
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch

from polyshard_offload.errors import SettingError

Tier = Literal["device", "host", "disk"]
TIERS: tuple[str, ...] = get_args(Tier)
PAGE_BYTES = max(4096, mmap.ALLOCATIONGRANULARITY)
"""Offsets, sizes and addresses of direct I/O are multiples of this many bytes.

So are those of mappings, which begin with a page of the kernel: some have pages of 64 KiB.
"""


@dataclass(frozen=True, kw_only=True)
class DiskSettings:
    """How the disk tier uses its file system.

    Attributes:
        path: an existing directory; each rank keeps its files there, under no name. It may differ
            between ranks. A file system in memory (tmpfs) saves nothing.
        io_threads: blocks in flight at once.
        block_bytes: size of one read or write.
        direct: bypass the page cache (O_DIRECT); ``"auto"`` where the file system allows it.
        checksums: verify optimizer state and parameters whenever they are read, by a CRC-32 of
            every byte, and read gradients back once they are written.
        backend: ``"posix"``, or ``"kvikio"`` for GPUDirect Storage (extra ``gds``).
    """

    path: Path = field(default_factory=lambda: Path(tempfile.gettempdir()), repr=False)
    io_threads: int = 4
    block_bytes: int = 8 << 20
    direct: bool | Literal["auto"] = "auto"
    checksums: bool = False
    backend: Literal["posix", "kvikio"] = "posix"

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            SettingError: naming the setting.
        """
        object.__setattr__(self, "path", Path(self.path))
        at_least("DiskSettings(io_threads", self.io_threads, 1)
        at_least("DiskSettings(block_bytes", self.block_bytes, PAGE_BYTES)
        if self.block_bytes % PAGE_BYTES:
            raise SettingError(
                f"DiskSettings(block_bytes={self.block_bytes}) must be a multiple of {PAGE_BYTES}, "
                "which direct I/O needs."
            )
        one_of("DiskSettings(direct", self.direct, (True, False, "auto"))
        one_of("DiskSettings(backend", self.backend, ("posix", "kvikio"))


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """The settings of an :class:`polyshard_offload.Offload`, complete: every tier is chosen."""

    params: Tier
    grads: Tier
    optimizer: Tier
    fraction: float
    pin: bool | Literal["auto"]
    prefetch: int
    chunk_bytes: int
    disk: DiskSettings
    step_in_backward: bool

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            SettingError: naming the setting, the reason and what to choose.
        """
        check_tiers(self.params, self.grads, self.optimizer)
        at_least("Offload(prefetch", self.prefetch, 0)
        at_least("Offload(chunk_bytes", self.chunk_bytes, 1)
        one_of("Offload(pin", self.pin, (True, False, "auto"))
        one_of("Offload(step_in_backward", self.step_in_backward, (True, False))
        if self.step_in_backward:
            check_in_backward(self.grads, self.optimizer)
        if not 0.0 <= self.fraction <= 1.0:
            raise SettingError(f"Offload(fraction={self.fraction!r}) must be from 0 to 1.")
        disk: object = self.disk
        if not isinstance(disk, DiskSettings):
            raise SettingError(
                f"Offload(disk={disk!r}) must be DiskSettings(path=...), got a "
                f"{type(disk).__name__}."
            )
        if self.pin is True and not may_pin():
            raise SettingError(
                "Offload(pin=True): there is no accelerator to page-lock memory for; leave "
                "pin='auto', which uses plain memory here."
            )

    @property
    def pins(self) -> bool:
        """Whether host memory is page-locked."""
        return may_pin() if self.pin == "auto" else self.pin

    @property
    def needs_wrap(self) -> bool:
        """Whether an optimizer that is not wrapped would leave a setting without effect."""
        # State on the host beside parameters on the host is what torch makes by itself.
        apart = self.optimizer == "disk" or (self.optimizer == "host" and self.params == "device")
        return apart or self.params == "disk" or self.step_in_backward


def may_pin() -> bool:
    """Whether page-locked memory can be had and would help."""
    return torch.accelerator.is_available()


def at_least(name: str, value: object, least: int) -> None:
    """Refuse ``value`` below ``least``, and what is no integer.

    Raises:
        SettingError: naming the setting.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingError(f"{name}={value!r}) must be an integer of at least {least}.")


def one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse what is not one of ``choices``.

    Raises:
        SettingError: listing them.
    """
    if not any(
        value is choice or (isinstance(value, str) and value == choice) for choice in choices
    ):
        listed = ", ".join(repr(choice) for choice in choices)
        raise SettingError(f"{name}={value!r}) must be one of {listed}.")


def check_tiers(params: str, grads: str, optimizer: str) -> None:
    """Refuse combinations that cannot work, with the reason.

    Raises:
        SettingError: saying what to choose instead.
    """
    for name, tier in (("params", params), ("grads", grads), ("optimizer", optimizer)):
        one_of(f"Offload({name}", tier, TIERS)
    chosen = f"Offload(params={params!r}, grads={grads!r}, optimizer={optimizer!r})"
    if params == "device" and grads != "device":
        raise SettingError(
            f"{chosen}: torch keeps a gradient on the device of its parameter, so gradients can "
            "leave the device only together with the parameters; choose params='host' or 'disk'."
        )
    if params != "device" and grads == "device":
        raise SettingError(
            f"{chosen}: torch keeps a gradient on the device of its parameter, which rests on the "
            f"{params}; choose grads='host' (or leave it out)."
        )
    if params != "device" and optimizer == "device":
        raise SettingError(
            f"{chosen}: the optimizer steps where the parameters rest, so its state cannot stay on "
            "the device when they do not; choose optimizer='host' or 'disk'."
        )
    if grads == "disk" and optimizer != "disk":
        raise SettingError(
            f"{chosen}: gradients are smaller than the optimizer state of most optimizers and "
            "needed at the same moment; move optimizer='disk' first."
        )


def check_in_backward(grads: str, optimizer: str) -> None:
    """Refuse tiers that stepping in backward makes no use of.

    Raises:
        SettingError: saying what to choose instead.
    """
    if optimizer == "device":
        raise SettingError(
            "Offload(step_in_backward=True, optimizer='device'): only optimizers whose state is "
            "offloaded are stepped here; choose optimizer='host' or 'disk'."
        )
    if grads == "disk":
        raise SettingError(
            "Offload(step_in_backward=True, grads='disk'): gradients are used as soon as they are "
            "reduced and never rest; choose grads='host'."
        )
