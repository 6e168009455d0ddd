"""The training of ``launch_survivors.py`` under Ray Train: ``ADDRESS OUT SECONDS``."""

from __future__ import annotations

import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

SCRIPT = Path(__file__)


def worker(settings: dict[str, str]) -> None:
    """Be one rank; Ray has made the process group."""
    sys.path.insert(0, str(SCRIPT.parent))
    import launch_survivors

    import polyshard_resilience

    polyshard_resilience.enable()
    launch_survivors.train(Path(settings["out"]), float(settings["seconds"]))


def main() -> None:
    """Start both workers, and both again when one has died."""
    address, out, seconds = sys.argv[1:]
    ray.init(address=address)
    TorchTrainer(
        worker,
        train_loop_config={"out": out, "seconds": seconds},
        torch_config=TorchConfig("gloo", timeout_s=60),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="ray", storage_path=out, failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()


if __name__ == "__main__":
    main()
