"""Where a page is written to."""

from __future__ import annotations

from pathlib import Path

from polyshard.files import replace_file
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.page.rendering import check_extra

__all__ = ["check_page", "write_page"]


def check_page(path: Path) -> None:
    """Refuse early what could not be written later.

    Raises:
        PlanError: where the extra ``html`` is not installed, or no file can be there.
    """
    check_extra()
    if path.is_dir():
        raise PlanError(f"--html {path} is a directory; name a file in it: {path / 'plan.html'}")
    if not path.parent.is_dir():
        raise PlanError(f"--html {path}: there is no directory {path.parent}; make it first")


def write_page(path: Path, page: str) -> None:
    """Put ``page`` at ``path``, whole or not at all.

    Raises:
        PlanError: where the system refuses it.
    """
    try:
        replace_file(path, page.encode())
    except OSError as error:
        raise PlanError(f"--html {path}: cannot be written ({error.strerror})") from error
