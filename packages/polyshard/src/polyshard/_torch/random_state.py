"""Where generators of random numbers are."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RandomState:
    """Python's, numpy's, torch's own and the accelerator's current generator, as a state."""

    def state_dict(self) -> dict[str, Any]:
        """Where each of them is."""
        version, words, gauss = random.getstate()
        kind, key, position, has_gauss, cached = np.random.get_state(legacy=True)
        return {
            "python": (version, words, gauss),
            "numpy": (str(kind), [int(k) for k in key], int(position), int(has_gauss), cached),
            "torch": torch.get_rng_state(),
            "device": _device_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it; an accelerator's stays as it is if there was none, or there is none now."""
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"].cpu())
        if state_dict["device"] is not None and torch.accelerator.is_available():
            _device_module().set_rng_state(state_dict["device"].cpu())


def _device_module() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())


def _device_state() -> torch.Tensor | None:
    if not torch.accelerator.is_available():
        return None
    state: torch.Tensor = _device_module().get_rng_state()
    return state
