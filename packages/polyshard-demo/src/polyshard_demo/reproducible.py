"""``--reproducible`` and ``--record``: the plugin polyshard-reproducible, where it is installed."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from polyshard_demo.errors import DemoError
from polyshard_demo.text import Windows

__all__ = ["check_slots", "reproducible_package", "reproducible_plugin", "slot_sampler"]

PACKAGE = "polyshard_reproducible"


def reproducible_package() -> Any:
    """What the plugin has to offer.

    Raises:
        DemoError: when it is not installed.
    """
    if find_spec(PACKAGE) is None:
        raise DemoError(
            "--reproducible needs the plugin polyshard-reproducible, which is not installed: "
            "pip install polyshard-reproducible"
        )
    return import_module(PACKAGE)


def check_slots(slots: int, ranks: int, batch: int) -> None:
    """Refuse slots that cannot be shared.

    Args:
        slots: micro-batches of a step, over all ranks.
        ranks: those that are data-parallel.
        batch: rows of a step, over all slots.

    Raises:
        DemoError: for numbers that do not divide, or without the plugin.
    """
    reproducible_plugin(slots)
    if slots % ranks:
        raise DemoError(
            f"--reproducible {slots}: {ranks} data-parallel ranks do not divide {slots} slots; "
            "use 1, 2, 4, 8, ... ranks, at most as many as slots"
        )
    if batch % slots:
        raise DemoError(
            f"--batch {batch} does not divide over {slots} slots; use a multiple of {slots}"
        )


def reproducible_plugin(slots: int, seed: int = 0) -> Any:
    """The plugin with so many slots.

    Raises:
        DemoError: for a number that it refuses, or without the plugin.
    """
    package = reproducible_package()
    try:
        return package.Reproducible(slots=slots, seed=seed)
    except package.ReproducibleError as error:
        raise DemoError(f"--reproducible {slots}: {error}") from error


def slot_sampler(windows: Windows, batch: int, slots: int, seed: int) -> Any:
    """Which windows of the text a slot trains on.

    Raises:
        DemoError: for a text that is too short for one step.
    """
    package = reproducible_package()
    try:
        return package.SlotSampler(windows.count, batch // slots, slots, seed=seed)
    except package.ReproducibleError as error:
        raise DemoError(f"--text {windows.corpus.name} is too short: {error}") from error
