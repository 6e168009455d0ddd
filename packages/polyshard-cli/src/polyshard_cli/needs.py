"""Extras that a verb needs, asked for before the verb is imported, and torch with it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

__all__ = ["is_config", "missing"]


def missing(verb: str, arguments: Sequence[str]) -> str:
    """What has to be installed for ``verb`` with these ``arguments``; empty if nothing is missing.

    Of ``plan`` the first argument is looked at: a config needs transformers.
    """
    if verb == "migrate" and find_spec("libcst") is None:
        return "polyshard migrate needs libcst: pip install 'polyshard-cli[migrate]'"
    model = arguments[0] if arguments else ""
    if verb == "plan" and is_config(model) and find_spec("transformers") is None:
        return (
            f"MODEL {model} is a config of transformers, which is not installed: "
            "pip install 'polyshard-cli[transformers]'; 'demo' needs nothing"
        )
    return ""


def is_config(name: str) -> bool:
    """Whether ``name`` is a directory, or looks like a config class of transformers."""
    return bool(name) and (Path(name).is_dir() or (name.isidentifier() and name.endswith("Config")))
