"""The command's wheel, built as a release builds it, and used from where it was unpacked."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[2]
COMMAND = ROOT / "packages" / "polyshard-cli"
TEMPLATE = Path("polyshard_cli", "template")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from that holds the wheel's files and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=COMMAND, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_template_travels_whole(site: Path) -> None:
    """Hatch leaves out what git ignores, so a pattern there could empty it."""
    checkout = COMMAND / "src" / TEMPLATE
    kept = {path.relative_to(checkout): path for path in checkout.rglob("*") if path.is_file()}
    assert len(kept) > 20
    for relative, path in kept.items():
        assert (site / TEMPLATE / relative).read_bytes() == path.read_bytes(), relative
