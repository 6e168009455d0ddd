"""The C++ part: compiled when it is first used, then taken from a folder for good."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from polyshard_sim.errors import SimError

_NAME = "_polyshard_sim"
_SOURCES = Path(__file__).with_name("csrc")
_OLDEST_TORCH = "2.13"
_FLAGS = ["-O1", "-std=c++20", "-g0", "-DUSE_C10D_GLOO"]
_BUILD = f"""
import sys
from torch.utils.cpp_extension import load
sources, flags, folder = sys.argv[1].split(";"), sys.argv[2].split(";"), sys.argv[3]
load(name={_NAME!r}, sources=sources, extra_cflags=flags, build_directory=folder)
"""


def missing_tools() -> list[str]:
    """What a build would need and is not there; empty where one is possible."""
    missing = []
    if TorchVersion(torch.__version__) < _OLDEST_TORCH:
        missing.append(f"torch {_OLDEST_TORCH} or newer (this is {torch.__version__})")
    if sys.platform != "linux":
        missing.append("Linux (the device's memory is a memfd)")
    if not shutil.which(os.environ.get("CXX", "c++")):
        missing.append("a C++20 compiler (Debian: apt install g++; or set CXX)")
    if not shutil.which("ninja", path=_search_path()):
        missing.append("ninja (pip install ninja)")
    if importlib.util.find_spec("setuptools") is None:
        missing.append("setuptools (pip install setuptools)")
    return missing


def library() -> Path:
    """The compiled library of these sources for this torch; built if it is not there yet."""
    folder = _cache() / _key()
    path = folder / f"{_NAME}.so"
    if path.exists():
        return path
    if missing := missing_tools():
        raise SimError(
            "polyshard-sim compiles its device when it is first used, and cannot here. Missing: "
            + "; ".join(missing)
        )
    with _locked(folder.with_suffix(".lock")):
        if not path.exists():  # built by another process meanwhile
            _build(folder)
    return path


@cache
def extension() -> Any:
    """The compiled module."""
    path = library()
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cache() -> Path:
    given = os.environ.get("POLYSHARD_SIM_CACHE")
    home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(given or f"{home}/polyshard-sim").expanduser()


def _key() -> str:
    """One for all that goes into the library."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return f"torch{torch.__version__}-{python}-{platform.machine()}-{digest.hexdigest()[:16]}"


def _search_path() -> str:
    """Where ninja may be: beside a Python that has not been activated, too."""
    return os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process; the system lets go of it when that process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path) -> None:
    """Build beside ``folder`` and rename, so that what is there is always whole."""
    # In a process of its own: loading registers operators, and a process may do so once.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as made:
        sources = sorted(map(str, _SOURCES.glob("*.cpp")))
        command = [sys.executable, "-c", _BUILD, ";".join(sources), ";".join(_FLAGS), made]
        done = subprocess.run(
            command,
            env={**os.environ, "PATH": _search_path()},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SimError(
                f"polyshard-sim could not compile its device for torch {torch.__version__}:\n"
                + (done.stdout + done.stderr)[-8000:]
            )
        folder.mkdir(exist_ok=True)
        (Path(made) / f"{_NAME}.so").rename(folder / f"{_NAME}.so")
