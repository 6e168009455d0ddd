"""``--quantize``: the plugin polyshard-quantized, where it is installed."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from polyshard_demo.errors import DemoError

__all__ = ["check_quantize", "quantizing_plugin"]

PACKAGE = "polyshard_quantized"
CLASSES = {"int8": "Int8Block", "e4m3": "Float8Block", "int4": "Int4Block", "native": None}


def check_quantize(text: str) -> tuple[str, str]:
    """The formats of parameters and of gradients that ``text`` names.

    Raises:
        DemoError: for a format that is not known, or when the plugin is not installed.
    """
    names = [name.strip() for name in text.split(",")]
    if len(names) > 2 or not set(names) <= CLASSES.keys():
        raise DemoError(
            f"--quantize takes one of {', '.join(CLASSES)}, or two with a comma (parameters, "
            f"gradients); got {text!r}"
        )
    if set(names) == {"native"}:
        raise DemoError(f"--quantize {text} quantizes nothing; leave the option out")
    if find_spec(PACKAGE) is None:
        raise DemoError(
            "--quantize needs the plugin polyshard-quantized, which is not installed: "
            "pip install polyshard-quantized"
        )
    return names[0], names[-1]


def quantizing_plugin(text: str) -> Any:
    """The plugin as ``text`` asks for it; 4-bit gradients come with error feedback."""
    weights, gradients = check_quantize(text)
    package = import_module(PACKAGE)
    feedback = package.ErrorFeedback() if gradients == "int4" else None
    return package.QuantizedComm(
        weights=_format(package, weights),
        gradients=_format(package, gradients),
        error_feedback=feedback,
    )


def _format(package: Any, name: str) -> Any:
    chosen = CLASSES[name]
    return getattr(package, chosen)() if chosen is not None else None
