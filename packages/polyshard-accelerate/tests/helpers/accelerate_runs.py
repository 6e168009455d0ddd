"""A model with all that is odd, accelerate and the Trainer on ranks of a World, and torch alone."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 7  # over two or three ranks nothing divides


class Odd(nn.Module):
    """Blocks of uneven layers, a frozen one, and a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = y + torch.tanh(block(y))
        return F.mse_loss(self.head(y).float() * self.scale, x[:, :3].float())


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def batch(step: int, rank: int) -> Tensor:
    """Inputs ``[4, WIDTH]``, the same in every run."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def as_launched(rank: int, size: int) -> None:
    """What a launcher says, and accelerate forgets of the call before."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    local = rank % (torch.cuda.device_count() or size)  # ranks may share a GPU
    for name, value in {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": size}.items():
        os.environ[name] = str(value)
    device = torch.get_default_device()
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    # accelerate need not know the device by name.
    os.environ |= {
        "ACCELERATE_USE_CPU": str(device.type == "cpu"),
        "ACCELERATE_TORCH_DEVICE": str(device),
    }
    for state in (PartialState, AcceleratorState, GradientState):
        state._shared_state.clear()


def alone(size: int, steps: int, accumulate: int = 1, clip: float | None = None) -> Odd:
    """What one process computes with the batches of ``size`` ranks."""
    model = Odd()
    optimizer = optimizer_of(model)
    for step in range(steps):
        for rank in range(size):
            (model(batch(step, rank)) / size / accumulate).backward()
        if (step + 1) % accumulate == 0:
            if clip is not None:
                trained = [p for p in model.parameters() if p.requires_grad]
                nn.utils.clip_grad_norm_(trained, clip)
            optimizer.step()
            optimizer.zero_grad()
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, gathered."""
    found: dict[str, Any] = dict(model.named_parameters())
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in found.items()
    }


def assert_equal(found: dict[str, Tensor], expected: nn.Module) -> None:
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-6, msg=name)


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(weight.cpu(), expected[name].cpu()), name
