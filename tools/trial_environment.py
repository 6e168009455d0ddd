"""An environment that holds wheels and nothing of the checkout, and what is run in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).parents[1]
COMMAND_SECONDS = 3600.0
GRACE_SECONDS = 60.0
"""For pytest to say what it has, once it was told to end; its ranks end with it."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended, in one line for the table; ``cut`` if that was after its seconds."""

    FAILED: ClassVar[str] = "failed"
    CUT: ClassVar[str] = "cut off"

    is_fine: bool
    said: str
    cut: float | None = None

    def __bool__(self) -> bool:
        return self.is_fine

    def __str__(self) -> str:
        if self.cut is not None:
            after = f"{self.cut / 60:.0f} min" if self.cut >= 60 else f"{self.cut:.0f} s"
            return f"{self.CUT} after {after}: {self.said or 'nothing was said'}"
        return self.said if self.is_fine else f"{self.FAILED}: {self.said}"


@dataclass(frozen=True)
class Budget:
    """The time that a trial has: ``ends`` on the monotonic clock, and what one command gets."""

    ends: float = float("inf")
    command: float = COMMAND_SECONDS

    @classmethod
    def of(cls, minutes: float) -> Budget:
        """That many from now on."""
        return cls(time.monotonic() + minutes * 60)

    def seconds(self) -> float:
        """For the next command; 0 if the trial's time is over."""
        return max(0.0, min(self.command, self.ends - time.monotonic()))


def interpreter(version: str) -> Path | None:
    """Python ``version`` (major and minor), where this machine has it."""
    if version == ".".join(map(str, sys.version_info[:2])):
        return Path(sys.executable)
    if (found := shutil.which(f"python{version}")) and _is_version(Path(found), version):
        return Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = sorted(pyenv.glob(f"{version}.*/bin/python"))
    return next((path for path in reversed(candidates) if _is_version(path, version)), None)


def _is_version(python: Path, version: str) -> bool:
    """A shim of pyenv may be on PATH for a version that is not chosen, and fails."""
    code = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    ended = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return ended.returncode == 0 and ended.stdout.strip() == version


def commit(root: Path) -> str:
    """The commit that is checked out, abbreviated."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout[:-1]


@dataclass(frozen=True)
class Environment:
    """A virtual environment below ``folder``, which whoever made the folder deletes."""

    folder: Path
    dist: Path
    budget: Budget = field(default_factory=Budget)

    @classmethod
    def made(cls, folder: Path, python: Path, dist: Path, budget: Budget) -> Environment:
        """A new one, of the interpreter ``python``."""
        subprocess.run([python, "-m", "venv", str(folder / "env")], check=True)
        (folder / "empty").mkdir()
        return cls(folder, dist, budget)

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "env" / "bin" / "python")

    def wheel(self, name: str) -> Path:
        """The built wheel of a distribution of this repository."""
        (found,) = self.dist.glob(f"{name.replace('-', '_')}-*.whl")
        return found

    def pip(self, *arguments: str) -> Outcome:
        """Run pip."""
        return self._run("-m", "pip", "--disable-pip-version-check", *arguments)

    def hold(self, wanted: list[str], known: list[str]) -> Outcome:
        """Have exactly the distributions ``wanted`` of ``known`` installed."""
        site = self.folder / "env"
        pattern = "lib/python*/site-packages/{}-*.dist-info"
        held = [name for name in known if any(site.glob(pattern.format(name.replace("-", "_"))))]
        absent = [name for name in held if name not in wanted]
        new = [str(self.wheel(name)) for name in wanted if name not in held]
        steps = [("uninstall", "--yes", *absent)] if absent else []
        # Not --no-deps: a plugin whose wheel asks for more than core's has to say so here.
        steps += [("install", *new)] if new else []
        outcome = Outcome(is_fine=True, said="")
        for step in steps:
            if not (outcome := self.pip(*step)):
                break
        return outcome

    def smoke(self, names: list[str]) -> Outcome:
        """Train a step; ``names`` are what must be installed."""
        return self._run("-I", str(ROOT / "tools" / "smoke.py"), *names)

    def mypy(self, script: Path) -> Outcome:
        """Check a copy of ``script`` where no settings of this repository are found."""
        shutil.copy(script, self.folder / "empty")
        return self._run("-m", "mypy", "--strict", script.name)

    def pytest(self, *arguments: str) -> Outcome:
        """Run tests of the checkout against the installed wheels; how many of each outcome."""
        quiet = ("-q", "--no-header", "-p", "no:cacheprovider", "--durations=0")
        return self._run("-m", "pytest", *quiet, *arguments, cwd=ROOT)

    def about(self, torch: str) -> dict[str, Any]:
        """Versions, and what this torch has; one that was not installed is called ``torch``."""
        code = "import platform; print(platform.python_version())"
        about: dict[str, Any] = {"torch": torch, "python": self._run("-c", code).said}
        code = "import torch; print(torch.__version__)"
        if version := self._run("-c", code):
            features = self._run(str(ROOT / "tools" / "torch_features.py"))
            about |= {"torch": version.said}
            about |= {"features": json.loads(features.said) if features else str(features)}
        return about

    def _run(self, *arguments: str, cwd: Path | None = None) -> Outcome:
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        env |= {"OMP_NUM_THREADS": "1", "MYPY_CACHE_DIR": str(self.folder / "mypy")}
        print("$", " ".join(arguments), flush=True)
        output = self.folder / "output"  # no pipe, which a rank that is left over would hold open
        limit = self.budget.seconds()
        with output.open("w") as file:
            started = subprocess.Popen(
                [self.python, *arguments],
                cwd=cwd or self.folder / "empty",
                env=env,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            is_cut = _was_cut(started, limit)
        text = output.read_text("utf-8", errors="replace")
        if started.returncode:
            print(text[-8000:], flush=True)
        is_fine = started.returncode == 0
        return Outcome(is_fine, summary(text), limit if is_cut else None)


def _was_cut(started: subprocess.Popen[bytes], limit: float) -> bool:
    """Wait for a session of processes, or end it: whether it had to be ended."""
    try:
        started.wait(limit)
    except subprocess.TimeoutExpired:
        started.send_signal(signal.SIGINT)  # pytest says how many tests there were so far
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(GRACE_SECONDS)
        return True
    else:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # ranks that outlive their test, too
        started.wait()


def summary(output: str) -> str:
    """The last line, without seconds; before it the tests that failed, by name."""
    lines = [line for line in output.splitlines() if line.strip()]
    last = re.sub(r" in [\d.]+s( \([\d:]+\))?$", "", lines[-1].strip("= ")) if lines else ""
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    names = [line.split(" ", 1)[1].rpartition("/")[2] for line in failed]
    return f"{last} ({', '.join(names)})" if names else last
