"""A job by its name, and the same one in every process."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyshard_cli.compare.errors import JobError
from polyshard_cli.compare.job.demonstration import demonstration
from polyshard_cli.compare.job.job import Job
from polyshard_cli.compare.settings import Settings
from polyshard_cli.plan.errors import PlanError
from polyshard_cli.plan.request.names import imported

__all__ = ["built", "digest_of", "draw_from", "load"]

CONTRACT = "build() returns (model, batch, loss) or polyshard_cli.compare.Job(...)"


def load(settings: Settings) -> Callable[[], object]:
    """The function that makes the job; nothing is made yet.

    Raises:
        JobError: when there is none.
    """
    name = settings.job
    if name == "demo" or name.startswith("demo:"):
        return demonstration(settings)
    if ":" in name and not name.endswith(".py"):
        try:
            found: Any = imported(name, "JOB")
        except PlanError as error:
            raise JobError(str(error)) from error
        return _function(name, found)
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise JobError(
            f"JOB {name!r} is neither a Python file, nor package.module:function, nor demo; "
            f"{'there is no such file' if path.suffix == '.py' else 'a file ends in .py'}"
        )
    module = _module(path)
    if not hasattr(module, "build"):
        functions = [n for n, f in vars(module).items() if callable(f) and not n.startswith("_")]
        raise JobError(
            f"JOB {name} has no build(); {CONTRACT}. It has {', '.join(functions) or 'nothing'}: "
            "write a function of that name, or name another as package.module:function"
        )
    return _function(f"{name}: build", module.build)


def built(settings: Settings, make: Callable[[], object]) -> Job:
    """The job, with the same initial weights in every process: whole, on the CPU.

    Raises:
        JobError: when ``make`` raises, or returns something else.
    """
    draw_from(settings.seed, "build")
    try:
        found = make()
    except Exception as error:
        raise JobError(
            f"JOB {settings.job}: build() raised {type(error).__name__}: {error}"
        ) from error
    job = _job_of(settings.job, found)
    if not isinstance(job.model, nn.Module):
        raise JobError(
            f"JOB {settings.job}: the model is a {type(job.model).__name__}; it must be a "
            "torch.nn.Module"
        )
    if not any(parameter.requires_grad for parameter in job.model.parameters()):
        raise JobError(f"JOB {settings.job}: {type(job.model).__name__} has no parameter to train")
    for what in ("batch", "loss", "optimizer"):
        if not callable(getattr(job, what)):
            raise JobError(
                f"JOB {settings.job}: {what} is a {type(getattr(job, what)).__name__}; it must be "
                "a function"
            )
    if any(tensor.is_meta for tensor in (*job.model.parameters(), *job.model.buffers())):
        _materialize(settings, job.model)
    return job


def draw_from(*what: object) -> None:
    """Have torch, ``random`` and NumPy (where it is imported) draw what follows from ``what``."""
    seed = random.Random(repr(what)).getrandbits(63)
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def digest_of(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """A number for the values of each parameter and buffer, by name."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return tuple((name, _checksum(tensor)) for name, tensor in tensors)


def _checksum(tensor: Tensor) -> int:
    plain = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(plain.numpy().tobytes())


def _function(name: str, found: object) -> Callable[[], object]:
    if not callable(found):
        raise JobError(f"JOB {name} is a {type(found).__name__}, not a function; {CONTRACT}")
    return found


def _module(path: Path) -> Any:
    """The file as a module; it finds modules that lie beside it."""
    name = f"polyshard_compare_job_{path.stem}"
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise JobError(
            f"JOB {path}: importing it failed: {type(error).__name__}: {error}"
        ) from error
    except SystemExit as error:
        raise JobError(
            f"JOB {path}: importing it left the program ({error.code}); put code that runs only as "
            'a script below `if __name__ == "__main__":`'
        ) from error
    return module


def _job_of(name: str, found: object) -> Job:
    if isinstance(found, Job):
        return found
    if isinstance(found, tuple) and len(found) == 3:
        return Job(*found)
    what = f"a tuple of {len(found)}" if isinstance(found, tuple) else f"a {type(found).__name__}"
    raise JobError(f"JOB {name}: build() returned {what}; {CONTRACT}")


def _materialize(settings: Settings, model: nn.Module) -> None:
    """Give a model of the meta device values, drawn in one order whatever the engine."""
    for name, module in model.named_modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if own and not callable(getattr(module, "reset_parameters", None)):
            raise JobError(
                f"JOB {settings.job}: the model is on the meta device, and {name or 'the root'} "
                f"({type(module).__name__}) has no reset_parameters() to fill it; add one, or "
                "build the model on the CPU"
            )
    model.to_empty(device="cpu")
    draw_from(settings.seed, "reset")
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
