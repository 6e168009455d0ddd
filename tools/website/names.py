"""The public names of every distribution, and the pages of the reference that are made of them."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workspace import CORE, distributions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

OPEN_ROOMS = (
    "checkpoint",
    "errors",
    "fsdp1",
    "guards",
    "plugins.builtin",
    "safetensors",
    "seams",
    "testing",
    "testing.streams",
    "transport",
)
"""Modules of core that are public beside ``polyshard`` itself. All others are the engine's own."""


@dataclass(frozen=True)
class Name:
    """A public name: where it is imported from, and what it stands for.

    One that needs what is not installed stands for the ``ImportError`` that says so.
    """

    module: str
    name: str
    value: object

    @property
    def path(self) -> str:
        """As in ``import`` lines, with dots."""
        return f"{self.module}.{self.name}"

    @property
    def kind(self) -> str:
        """As Sphinx calls it: class, exception, function or data."""
        if isinstance(self.value, ImportError):
            return "class"
        if inspect.isclass(self.value):
            return "exception" if issubclass(self.value, BaseException) else "class"
        return "function" if inspect.isroutine(self.value) else "data"

    @property
    def home(self) -> str:
        """The module that defines it."""
        return str(getattr(self.value, "__module__", self.module))


def public_modules(root: Path) -> list[str]:
    """Every module that users and authors of plugins may import, in the order of the reference."""
    fronts = [dist.import_name for dist in distributions(root)]
    rooms = [f"{CORE}.{room}" for room in OPEN_ROOMS]
    named = [front for front in fronts if public_names(importlib.import_module(front))]
    return [CORE, *rooms, *sorted(set(named) - {CORE})]


def public_names(module: ModuleType) -> list[Name]:
    """Names of ``module`` that are public: its ``__all__``.

    Of a file without one all classes and functions that it defines; of a package without one none.
    """
    chosen = getattr(module, "__all__", None)
    if chosen is None:
        chosen = () if hasattr(module, "__path__") else _defined(module)
    names = [name for name in chosen if not name.startswith("__")]
    return [Name(module.__name__, name, _value(module, name)) for name in names]


def _value(module: ModuleType, name: str) -> object:
    try:
        return getattr(module, name)
    except ImportError as error:
        return error


def _defined(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        is_own = getattr(value, "__module__", None) == module.__name__
        if is_own and not name.startswith("_") and callable(value):
            yield name


def reference(modules: list[str]) -> dict[str, str]:
    """The text of each page of the reference, in reStructuredText, by its name without suffix.

    A name that several modules offer is described where it comes first; the others point there.
    """
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for module in modules:
        names = public_names(importlib.import_module(module))
        entries = []
        for name in names:
            known = (
                first.setdefault(id(name.value), name.path) if name.kind != "data" else name.path
            )
            entries.append(_entry(name, known))
        found[module] = "\n".join([_head(module), _summary(names), *entries])
    return found


def _head(module: str) -> str:
    return f"{module}\n{'=' * len(module)}\n\n.. automodule:: {module}\n"


def _summary(names: list[Name]) -> str:
    rows = [f"   * - :py:obj:`~{name.path}`\n     - {_first_sentence(name)}" for name in names]
    return "\n".join([".. list-table::", "   :widths: 30 70", "", *rows, ""])


def _first_sentence(name: Name) -> str:
    if name.home.startswith("torch."):
        return "torch's own class."
    if isinstance(name.value, ImportError):
        return str(name.value)
    if name.kind == "data":
        return f"A value of type ``{type(name.value).__name__}``."
    text = inspect.getdoc(name.value) or ""
    return " ".join(text.split("\n\n")[0].split())


def _entry(name: Name, known: str) -> str:
    if name.home.startswith("torch."):
        return _mention(
            name, f"torch's own ``{name.home}.{name.name}``, so that both engines take it."
        )
    if isinstance(name.value, ImportError):
        return _mention(name, str(name.value))
    if known != name.path:
        return _mention(name, f"The same as :py:obj:`{known}`.")
    options = ["   :members:", "   :show-inheritance:"] if inspect.isclass(name.value) else []
    if name.kind == "data":
        options = ["   :no-value:"]
    return "\n".join([f".. auto{name.kind}:: {name.path}", *options, ""])


def _mention(name: Name, says: str) -> str:
    return f".. py:{name.kind}:: {name.name}\n   :module: {name.module}\n\n   {says}\n"
