"""``--tp``: the plugin polyshard-tensor-parallel with its plan for the model of the demo."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from polyshard_demo.errors import DemoError

__all__ = ["check_tp", "tensor_parallel_plugin"]

PACKAGE = "polyshard_tensor_parallel"


def check_tp(ranks: int, tp: int, engine: str) -> None:
    """Refuse what cannot be laid out.

    Args:
        ranks: of the whole run.
        tp: ranks that share each layer; 1 leaves the plugin out.
        engine: name of the engine.

    Raises:
        DemoError: for numbers that do not divide, another engine, or without the plugin.
    """
    if tp == 1:
        return
    if tp < 1 or ranks % tp:
        raise DemoError(f"--tp {tp} does not divide --ranks {ranks}; --ranks {2 * tp} would do")
    if engine != "polyshard":
        raise DemoError(f"--tp needs --engine polyshard, got --engine {engine}")
    if find_spec(PACKAGE) is None:
        raise DemoError(
            "--tp needs the plugin polyshard-tensor-parallel, which is not installed: "
            "pip install polyshard-tensor-parallel"
        )


def tensor_parallel_plugin(mesh: Any) -> Any:
    """The plugin over ``mesh``, the tensor-parallel slice; its plan is not applied yet."""
    package = import_module(PACKAGE)
    return package.TensorParallel(package.demo_plan(), mesh=mesh)
