"""One replica group under Ray Train, whose workers all start anew, however often one has failed.

In a cluster that runs, once for each group; ``torchft_lighthouse`` is on a host that stays up::

    python examples/launch/ray_groups.py --group=0 --lighthouse=http://HOST:29510 --out=/shared/run

Options are those of ``examples/replicas/train.py``. Names of nodes resolve on nodes: groups reach
each other by them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

FOLDER = Path(__file__).resolve().parents[1] / "replicas"


def training() -> Any:
    """The module ``examples/replicas/train.py``, on workers too."""
    sys.path.insert(0, str(FOLDER))  # before this folder, which has a ``train.py`` as well
    return importlib.import_module("train")


def worker(settings: dict[str, Any]) -> None:
    """Be one rank; Ray has made the process group."""
    train = training()
    train.train(train.Settings(**settings))


def main() -> None:
    """Start the group, and start all of it again when a worker has failed."""
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--lighthouse", required=True, help="its address")
    flags.add_argument("--address", default="auto", help="of the cluster; by default the local one")
    own, rest = flags.parse_known_args()
    settings = training().settings_of(__doc__, rest)
    ray.init(address=own.address, runtime_env={"env_vars": {"TORCHFT_LIGHTHOUSE": own.lighthouse}})
    TorchTrainer(
        worker,
        train_loop_config=asdict(settings),
        torch_config=TorchConfig("gloo", timeout_s=60),
        scaling_config=ScalingConfig(num_workers=own.workers),
        run_config=RunConfig(
            name=f"group-{settings.group}",
            storage_path=str(settings.out.absolute()),
            failure_config=FailureConfig(max_failures=-1),
        ),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
