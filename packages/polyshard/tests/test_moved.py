"""Names of earlier releases: found, the same objects, with a warning that says the new place."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import polyshard
from polyshard._moved import MODULES


@pytest.mark.parametrize(("old", "new"), sorted(MODULES.items()))
def test_a_moved_module_is_found(old: str, new: str) -> None:
    pytest.importorskip(new)
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=rf"{old} moved to {new}; .* through 0\.x"):
        found = importlib.import_module(old)
    assert found is sys.modules[new]
    assert found.__name__ == new
    assert found.__spec__ is not None
    assert found.__spec__.name == new


def test_names_of_a_moved_module_are_imported_as_before() -> None:
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from polyshard.layout import GroupLayout\n"
        "import polyshard.compat\n"
        "from polyshard.sharding.layout import GroupLayout as Now\n"
        "assert GroupLayout is Now and polyshard.compat.from_fsdp_extensions\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_moved_name_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polyshard_calibration", None)
    with pytest.raises(AttributeError, match="pip install polyshard-calibration"):
        polyshard.Calibration  # type: ignore[attr-defined]  # noqa: B018
    monkeypatch.setitem(sys.modules, "polyshard_calibration", pytest)  # anything with attributes
    monkeypatch.setattr(pytest, "Calibration", object, raising=False)
    with pytest.warns(DeprecationWarning, match=r"moved to polyshard_calibration\.Calibration"):
        assert polyshard.Calibration is object  # type: ignore[attr-defined]


def test_an_unknown_name_is_unknown() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing_like_it'"):
        polyshard.nothing_like_it  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("polyshard.nothing_like_it")
