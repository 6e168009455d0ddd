"""What torch offers to device types under names of its own."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

_PRIVATE_USE: Any = torch._C._autograd.DeviceType.PrivateUse1
DEVICE_TYPE = int(_PRIVATE_USE)


def claim_device_type(name: str) -> None:
    """Call the device type for extensions ``name``; before the first use of it."""
    rename_privateuse1_backend(name)


def claimed_name() -> str:
    """What the device type for extensions is called: ``privateuseone`` if it is not claimed."""
    return str(torch._C._get_privateuse1_backend_name())


def register_module(name: str, module: ModuleType) -> None:
    """Make ``module`` what torch knows as ``torch.NAME``, with the methods of tensors."""
    torch._register_device_module(name, module)
    generate_methods_for_privateuse1_backend(for_storage=True)


def as_stream(cls: type[Any], stream: torch.Stream) -> Any:
    """The same stream as an object of ``cls``."""
    return cls(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )
