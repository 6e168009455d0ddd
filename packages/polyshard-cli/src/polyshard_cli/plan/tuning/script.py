"""The best setting as Python to paste: it shards ``model`` and makes its optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import groupby, pairwise

from polyshard_cli.plan.drafting import Subject
from polyshard_cli.plan.dry_run.units import units_of
from polyshard_cli.plan.request.model import built
from polyshard_cli.plan.request.names import imported
from polyshard_cli.plan.request.plugins import is_plugin, tensor_plan
from polyshard_cli.plan.request.settings import Settings

OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "sgd": "torch.optim.SGD(model.parameters(), lr=1e-3)",
    "momentum": "torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)",
}
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")

Names = tuple[str, ...]
"""Of the modules of one unit."""


def script_of(settings: Settings, subject: Subject) -> str:
    """Python that does on every rank what ``settings`` plan; ``model`` and ranks are the caller's.

    It leaves ``optimizer`` behind; the learning rate in it is to be replaced.
    """
    return "\n".join(_Script(settings, subject).lines()) + "\n"


class _Script:
    """Lines, and what they import."""

    def __init__(self, settings: Settings, subject: Subject) -> None:
        self._settings, self._subject = settings, subject
        self._imports: dict[str, set[str]] = {"polyshard": {"fully_shard"}}
        self._before: list[str] = []
        self._plugins: list[str] = []

    def lines(self) -> Iterator[str]:
        mesh = self._mesh()
        if self._settings.mesh.size("tensor") > 1:
            self._tensor_parallel()
        for name in self._settings.plugins:
            self._plugins.append(self._named(name))
        if self._settings.quantize:
            self._quantized()
        optimizer = self._optimizer()
        body = [mesh, *self._before, *self._sharding(), *self._units(), optimizer]
        yield "import torch"
        yield "from torch.distributed.device_mesh import init_device_mesh"
        yield ""
        for module, names in sorted(self._imports.items()):
            yield f"from {module} import {', '.join(sorted(names))}"
        yield ""
        yield from body

    def _import(self, module: str, *names: str) -> None:
        self._imports.setdefault(module, set()).update(names)

    def _mesh(self) -> str:
        mesh = self._settings.mesh
        sizes, names = tuple(a.size for a in mesh.axes), tuple(a.name for a in mesh.axes)
        device = "cuda" if self._subject.backend == "nccl" else "cpu"
        return f'mesh = init_device_mesh("{device}", {sizes}, mesh_dim_names={_quoted(names)})'

    def _tensor_parallel(self) -> None:
        name = tensor_plan(self._settings, self._subject.loaded, built(self._subject.loaded))
        module, _, function = name.partition(":")
        self._import(module, function)
        self._import("polyshard_tensor_parallel", "TensorParallel")
        axis = self._settings.mesh.name("tensor")
        self._before += [
            f'tensor_parallel = TensorParallel({function}(), mesh=mesh["{axis}"])',
            "tensor_parallel.apply(model)",
        ]
        self._plugins.append("tensor_parallel")

    def _named(self, name: str) -> str:
        module, colon, attribute = name.partition(":")
        if not colon:
            return f'"{name}"'
        self._import(module, attribute.partition(".")[0])
        return attribute if is_plugin(imported(name, "--plugins")) else f"{attribute}()"

    def _quantized(self) -> None:
        self._import("polyshard_quantized", "QuantizedComm")
        names = [name.strip() for name in self._settings.quantize.split(",")]
        weights, gradients = self._format(names[0]), self._format(names[-1])
        words = [f"    weights={weights},", f"    gradients={gradients},"]
        package = import_module("polyshard_quantized")
        if names[-1] != "native" and package.format_named(names[-1]).needs_feedback:
            self._import("polyshard_quantized", "ErrorFeedback")
            words.append("    error_feedback=ErrorFeedback(),")
        self._before += ["quantized = QuantizedComm(", *words, ")"]
        self._plugins.append("quantized")

    def _format(self, name: str) -> str:
        if name == "native":
            return "None"
        self._import("polyshard_quantized", "format_named")
        return f'format_named("{name}")'

    def _optimizer(self) -> str:
        made = OPTIMIZERS[self._settings.optimizer]
        if self._settings.offload:
            self._import("polyshard_offload", "Offload")
            parts = [part.strip().split("=") for part in self._settings.offload.split(",")]
            words = ", ".join(f"{k}={v}" if k == "fraction" else f'{k}="{v}"' for k, v in parts)
            self._before.append(f"offload = Offload({words})")
            self._plugins.append("offload")
            return f"optimizer = offload.wrap({made})"
        self._import("polyshard_optimizers", "flat")
        return f"optimizer = flat({made})"

    def _sharding(self) -> Iterator[str]:
        settings = self._settings
        data = settings.mesh.data_axes
        is_whole = len(data) == len(settings.mesh.axes)
        part = f'"{data[0]}"' if len(data) == 1 else ", ".join(f'"{name}"' for name in data)
        yield "sharding = {"
        yield f'    "mesh": {"mesh" if is_whole else f"mesh[{part}]"},'
        if settings.reshard is not None:
            yield f'    "reshard_after_forward": {settings.reshard},'
        if settings.placement:
            module, _, function = settings.placement.partition(":")
            self._import(module, function.partition(".")[0])
            yield f'    "shard_placement_fn": {function},'
        if settings.bf16:
            self._import("polyshard", "MixedPrecisionPolicy")
            yield '    "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),'
        if self._plugins:
            yield f'    "plugins": [{", ".join(self._plugins)}],'
        yield "}"

    def _units(self) -> Iterator[str]:
        model = built(self._subject.loaded)
        names = {id(module): name for name, module in reversed(list(model.named_modules()))}
        units = units_of(model, self._settings.units)
        members = [tuple(names[id(module)] for module in unit) for unit in units.values()]
        members.sort(key=lambda unit: (-unit[0].count("."), NUMBER.sub("*", unit[0])))
        for _, alike in groupby(members, lambda unit: (NUMBER.sub("*", unit[0]), len(unit))):
            yield from _calls(list(alike))
        yield "fully_shard(model, **sharding)"


def _calls(units: Sequence[Names]) -> Iterator[str]:
    """``fully_shard`` of units whose names differ in numbers: in a loop, where those count up."""
    template = _template(units)
    if template is None:
        for unit in units:
            calls = ", ".join(f'model.get_submodule("{name}")' for name in unit)
            yield f"fully_shard({calls if len(unit) == 1 else f'[{calls}]'}, **sharding)"
        return
    first, run = int(_number(units[0][0])), len(units[0])
    last = first + run * len(units)
    numbers = f"{first}, {last}, {run}" if run > 1 else f"{first}, {last}" if first else f"{last}"
    yield f"for i in range({numbers}):"
    if run == 1:
        yield f'    fully_shard(model.get_submodule(f"{template % "i"}"), **sharding)'
    else:
        yield f'    blocks = [model.get_submodule(f"{template % "i + j"}") for j in range({run})]'
        yield "    fully_shard(blocks, **sharding)"


def _template(units: Sequence[Names]) -> str | None:
    """A name with a place for its number, if members count up by one."""
    names = [name for unit in units for name in unit]
    if len(units) < 2 or any(len(NUMBER.findall(name)) != 1 for name in names):
        return None
    numbers = [int(_number(name)) for name in names]
    counts = all(b == a + 1 for a, b in pairwise(numbers))
    return NUMBER.sub("{%s}", names[0]) if counts else None


def _number(name: str) -> str:
    found: list[str] = NUMBER.findall(name)
    return found[0]


def _quoted(names: Names) -> str:
    return repr(names).replace("'", '"')
