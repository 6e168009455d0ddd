"""The same training under Ray Train: a worker on each of several nodes, started anew after a fault.

In a cluster that runs (``ray start``), on any of its nodes::

    python examples/launch/ray_train.py --workers=2 --out=/shared/run
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import ray
import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def worker(settings: dict[str, Any]) -> None:
    """Be one rank; Ray has made the process group. Checkpoints are the training's own."""
    train.train(train.Settings(**settings))


def main() -> None:
    """Start workers, and start all of them again when one has failed."""
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--gpu", action="store_true", help="one for each worker")
    flags.add_argument("--max-failures", type=int, default=3)
    flags.add_argument("--address", default="auto", help="of the cluster; by default the local one")
    own, rest = flags.parse_known_args()
    settings = train.settings_of(rest)
    ray.init(address=own.address)
    TorchTrainer(
        worker,
        train_loop_config=asdict(settings),
        torch_config=TorchConfig("nccl" if own.gpu else "gloo", timeout_s=60),
        scaling_config=ScalingConfig(
            num_workers=own.workers, use_gpu=own.gpu, placement_strategy="SPREAD"
        ),
        run_config=RunConfig(
            name="ray",
            storage_path=str(settings.out.absolute()),
            failure_config=FailureConfig(max_failures=own.max_failures),
        ),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
