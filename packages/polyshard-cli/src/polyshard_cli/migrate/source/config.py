"""A DeepSpeed configuration: a dict in the script, or a JSON file, with where each key stands."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst

from polyshard_cli.migrate.errors import MigrateError
from polyshard_cli.migrate.source.files import read
from polyshard_cli.migrate.source.view import FileView
from polyshard_cli.migrate.terms.deepspeed import KEYS
from polyshard_cli.migrate.terms.term import Term

__all__ = ["Configuration", "Setting", "find_configuration", "load_configuration"]


@dataclass(frozen=True)
class Setting:
    """One key with its value; ``term`` is unknown where no table has it.

    ``line`` is its place in the script, 0 if it has none; ``place`` begins a message then.
    """

    key: str
    value: Any
    term: Term | None
    line: int = 0
    place: str = ""

    @property
    def is_off(self) -> bool:
        """Whether it asks for nothing."""
        if self.key in _SWITCHES:
            enabled = self.value.get("enabled") if isinstance(self.value, Mapping) else self.value
            return not enabled
        if isinstance(self.value, Mapping):
            return not self.value or self.value.get("enabled") is False
        return self.value in (False, None, "none") or self.value == _OFF.get(self.key, "")

    @property
    def is_auto(self) -> bool:
        """Whether another library fills it in (transformers' ``Trainer`` does)."""
        inner = self.value.values() if isinstance(self.value, Mapping) else (self.value,)
        return "auto" in [each for each in inner if isinstance(each, str)]


_SWITCHES = {"bf16", "fp16", "amp", "torch_autocast"}
_OFF: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "gradient_predivide_factor": 1,
    "gradient_clipping": 0,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.mics_shard_size": -1,
}


@dataclass(frozen=True)
class Configuration:
    """What was read: ``text``, which ``name`` has, or begins at ``first_line`` of the script."""

    values: Mapping[str, Any]
    name: str
    text: str
    first_line: int = 0

    def settings(self) -> Iterator[Setting]:
        """Every key that the table has, or that stands beside one of those."""
        yield from self._below(self.values, "")

    def _below(self, values: Mapping[str, Any], prefix: str) -> Iterator[Setting]:
        for name, value in values.items():
            key = f"{prefix}{name}"
            has_inner = any(term.theirs.startswith(f"{key}.") for term in KEYS.terms)
            if has_inner and isinstance(value, Mapping):
                yield from self._below(value, f"{key}.")
            elif not has_inner or value:  # else a section that is switched off
                yield self._setting(key, value)

    def _setting(self, key: str, value: object) -> Setting:
        at = 0
        for part in key.split("."):
            found = re.compile(rf"""["']{re.escape(part)}["']\s*:""").search(self.text, at)
            at = found.end() if found else at
        line = self.text.count("\n", 0, at)
        term = KEYS.find(key)
        if self.first_line:
            return Setting(key, value, term, line=self.first_line + line)
        return Setting(key, value, term, place=f"{self.name}:{line + 1}: ")


def load_configuration(path: Path) -> Configuration:
    """The JSON file at ``path``.

    Raises:
        MigrateError: when it cannot be read, or is no JSON object.
    """
    try:
        text = read(path).decode("utf-8")
        values = json.loads(text)
    except ValueError as error:
        if isinstance(error, MigrateError):
            raise
        raise MigrateError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise MigrateError(f"{path}: not a DeepSpeed configuration: an object was expected")
    return Configuration(values, path.name, text)


def find_configuration(
    view: FileView, value: cst.BaseExpression, folder: Path
) -> Configuration | None:
    """What an argument is, where it is a dict written out, or names a JSON file that is there."""
    given, value = value, view.value(value)
    try:
        found = ast.literal_eval(view.code(value).strip())
    except (ValueError, SyntaxError):
        return None
    if isinstance(found, dict) and all(isinstance(key, str) for key in found):
        if isinstance(given, cst.Name) and not _is_only_read(view, given):
            return None
        return Configuration(found, "the configuration", view.code(value), view.line(value))
    if isinstance(found, str) and (path := folder / found).is_file():
        return load_configuration(path)
    return None


def _is_only_read(view: FileView, name: cst.Name) -> bool:
    """Whether the dict ``name`` is looked into at most, beside where it is given as ``name``."""
    for mention in view.mentions(name):
        node: cst.CSTNode = mention
        holder = view.parent(node)
        while isinstance(holder, cst.Subscript) and holder.value is node:
            node, holder = holder, view.parent(holder)
        is_get = isinstance(holder, cst.Attribute) and holder.attr.value == "get"
        is_item = node is not mention and not isinstance(holder, _MAY_CHANGE)
        if mention is not name and not is_get and not is_item:
            return False
    return True


_MAY_CHANGE = (cst.AssignTarget, cst.AugAssign, cst.Del, cst.Element, cst.Attribute)
"""What items of a dict are in where they are set or deleted, or where their methods are called."""
