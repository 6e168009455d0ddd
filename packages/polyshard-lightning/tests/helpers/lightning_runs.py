"""A LightningModule with all that is odd, a Trainer on ranks of a World, and one process."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

WIDTH = 7  # over two or three ranks nothing divides


class Odd(LightningModule):
    """Blocks of uneven layers, a frozen one, and parameters of the module's own.

    ``training_step`` uses parts of the module beside ``forward``.
    """

    def __init__(self, rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks[1].requires_grad_(False)
        self.losses: list[float] = []
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self.head(self(batch)) * self.scale, batch[:, :3])

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("score", self.loss(batch), sync_dist=True)
        self.seen.append(self.loss(batch).item())

    def test_step(self, batch: Tensor, index: int) -> None:
        self.seen.append(self.loss(batch).item())

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        predicted: Tensor = self.head(self(batch))
        return predicted

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.hparams["rate"])
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)]


def batch(step: int, rank: int) -> Tensor:
    """Inputs ``[4, WIDTH]``, the same in every run."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def batches(steps: int, rank: int) -> Any:
    rows: Any = [batch(step, rank) for step in range(steps)]
    return DataLoader(rows, batch_size=None)


class RanksDevice(Accelerator):
    """Where ranks of a World compute, which Lightning need not know by name."""

    def setup_device(self, device: torch.device) -> None:
        del device  # it is the current one

    def teardown(self) -> None: ...

    @staticmethod
    def parse_devices(devices: int) -> int:
        return devices

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        kind = torch.get_default_device().type
        return [torch.device(kind, index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return dist.get_world_size()

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "ranks"


def trainer(size: int, strategy: Any, **settings: Any) -> Trainer:
    """A Trainer whose ranks are those of the World that calls this."""
    quiet()
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    given: dict[str, Any] = {
        "max_steps": 4,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return Trainer(
        accelerator="cpu" if torch.get_default_device().type == "cpu" else RanksDevice(),
        devices=size,
        strategy=strategy,
        plugins=[LightningEnvironment()],
        **(given | settings),
    )


def quiet() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")


def alone(size: int, steps: int, accumulate: int = 1, clip: float | None = None) -> Odd:
    """What one process computes with the batches of ``size`` ranks; losses are their means."""
    module = Odd()
    [optimizer], [schedule] = module.configure_optimizers()
    del schedule  # Lightning's advance by epochs, of which there is one
    for step in range(steps):
        for rank in range(size):
            loss = module.loss(batch(step, rank))
            (loss / size / accumulate).backward()
        if (step + 1) % accumulate == 0:
            if clip is not None:
                trained = [p for p in module.parameters() if p.requires_grad]
                nn.utils.clip_grad_norm_(trained, clip)
            optimizer.step()
            optimizer.zero_grad()
    return module


def whole(module: nn.Module) -> dict[str, Tensor]:
    """All parameters, gathered."""
    return {
        n: getattr(p, "full_tensor", lambda p=p: p)().detach() for n, p in module.named_parameters()
    }


def assert_equal(found: dict[str, Tensor], expected: nn.Module) -> None:
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-6, msg=name)
