"""The scripts can be imported, by ranks too; and the folder that all of them begin with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

pytest.importorskip("transformers")

import llama


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As if it had been downloaded: ``transformers`` wrote it."""
    folder = tmp_path_factory.mktemp("models") / "base"
    llama.begin(folder)
    return folder
