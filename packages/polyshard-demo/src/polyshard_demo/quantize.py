"""``--quantize``: the plugin polyshard-quantized, where it is installed."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from polyshard_demo.errors import DemoError

__all__ = ["check_quantize", "quantizing_plugin"]

PACKAGE = "polyshard_quantized"
NATIVE = "native"


def check_quantize(text: str) -> tuple[str, str]:
    """The formats of parameters and of gradients that ``text`` names.

    Raises:
        DemoError: for a format that the plugin does not know, or when it is not installed.
    """
    names = [name.strip() for name in text.split(",")]
    if set(names) == {NATIVE}:
        raise DemoError(f"--quantize {text} quantizes nothing; leave the option out")
    known = (*_package().format_names(), NATIVE)
    if len(names) > 2 or not set(names) <= set(known):
        raise DemoError(
            f"--quantize takes one of {', '.join(known)}, or two with a comma (parameters, "
            f"gradients); got {text!r}"
        )
    return names[0], names[-1]


def quantizing_plugin(text: str) -> Any:
    """The plugin as ``text`` asks for it, with error feedback for gradients that need it."""
    package = _package()
    weights, gradients = (
        None if name == NATIVE else package.format_named(name) for name in check_quantize(text)
    )
    needs_feedback = gradients is not None and gradients.needs_feedback
    return package.QuantizedComm(
        weights=weights,
        gradients=gradients,
        error_feedback=package.ErrorFeedback() if needs_feedback else None,
    )


def _package() -> Any:
    if find_spec(PACKAGE) is None:
        raise DemoError(
            "--quantize needs the plugin polyshard-quantized, which is not installed: "
            "pip install polyshard-quantized"
        )
    return import_module(PACKAGE)
