"""The best setting as Python to paste: it shards ``model`` and makes its optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby, pairwise

from torch import nn

from polyshard_cli.plan.drafting import Subject
from polyshard_cli.plan.dry_run.units import units_of
from polyshard_cli.plan.request.model import built
from polyshard_cli.plan.request.names import imported
from polyshard_cli.plan.request.plugins import NATIVE, is_plugin, tensor_plan
from polyshard_cli.plan.request.settings import Settings

OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "sgd": "torch.optim.SGD(model.parameters(), lr=1e-3)",
    "momentum": "torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)",
}
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")

Names = tuple[str, ...]
"""Of the modules of one unit."""


@dataclass(frozen=True)
class _Plugin:
    """One of the list that ``fully_shard`` is given."""

    name: str
    """As it is written in that list."""
    imports: tuple[str, ...] = ()
    """``module:name``."""
    lines: tuple[str, ...] = ()
    """Which make it."""


def script_of(settings: Settings, subject: Subject) -> str:
    """Python that does on every rank what ``settings`` plan; ``model`` and ranks are the caller's.

    It leaves ``optimizer`` behind; the learning rate in it is to be replaced.
    """
    model, plugins = built(subject.loaded), list(_plugins(settings, subject))
    wrap = "offload.wrap" if settings.offload else "flat"
    needed = ["polyshard:fully_shard", *(name for plugin in plugins for name in plugin.imports)]
    needed += ["polyshard_optimizers:flat"] * (wrap == "flat") + [settings.placement]
    needed += ["polyshard:MixedPrecisionPolicy"] * settings.bf16
    lines = [
        "import torch",
        "from torch.distributed.device_mesh import init_device_mesh",
        "",
        *_imports(filter(None, needed)),
        "",
        _mesh(settings, subject),
        *(line for plugin in plugins for line in plugin.lines),
        *_sharding(settings, [plugin.name for plugin in plugins]),
        *_units(model, settings),
        f"optimizer = {wrap}({OPTIMIZERS[settings.optimizer]})",
    ]
    return "\n".join(lines) + "\n"


def _imports(names: Iterable[str]) -> Iterator[str]:
    found: dict[str, set[str]] = {}
    for module, _, attribute in (name.partition(":") for name in names):
        found.setdefault(module, set()).add(attribute.partition(".")[0])
    for module, attributes in sorted(found.items()):
        yield f"from {module} import {', '.join(sorted(attributes))}"


def _mesh(settings: Settings, subject: Subject) -> str:
    axes = settings.mesh.axes
    sizes, names = tuple(a.size for a in axes), tuple(a.name for a in axes)
    device = "cuda" if subject.backend == "nccl" else "cpu"
    quoted = repr(names).replace("'", '"')
    return f'mesh = init_device_mesh("{device}", {sizes}, mesh_dim_names={quoted})'


def _plugins(settings: Settings, subject: Subject) -> Iterator[_Plugin]:
    if settings.mesh.size("tensor") > 1:
        plan = tensor_plan(settings, subject.loaded, built(subject.loaded))
        axis = f'mesh["{settings.mesh.name("tensor")}"]'
        made = f"tensor_parallel = TensorParallel({plan.partition(':')[2]}(), mesh={axis})"
        imports = (plan, "polyshard_tensor_parallel:TensorParallel")
        yield _Plugin("tensor_parallel", imports, (made, "tensor_parallel.apply(model)"))
    for name in settings.plugins:
        attribute = name.partition(":")[2]
        if not attribute:
            yield _Plugin(f'"{name}"')
        else:
            is_made = is_plugin(imported(name, "--plugins"))
            yield _Plugin(attribute if is_made else f"{attribute}()", (name,))
    if settings.quantize:
        yield _quantized([name.strip() for name in settings.quantize.split(",")])
    if settings.offload:
        yield _offload(settings.offload)


def _quantized(names: Sequence[str]) -> _Plugin:
    """With formats of parameters and of gradients, or one of both."""
    package = import_module("polyshard_quantized")
    used = {"QuantizedComm"} | {"format_named" for name in names if name != NATIVE}
    weights, gradients = (
        "None" if name == NATIVE else f'format_named("{name}")' for name in (names[0], names[-1])
    )
    lines = [f"    weights={weights},", f"    gradients={gradients},"]
    if names[-1] != NATIVE and package.format_named(names[-1]).needs_feedback:
        used.add("ErrorFeedback")
        lines.append("    error_feedback=ErrorFeedback(),")
    imports = tuple(f"polyshard_quantized:{name}" for name in used)
    return _Plugin("quantized", imports, ("quantized = QuantizedComm(", *lines, ")"))


def _offload(text: str) -> _Plugin:
    words, imports = [], {"polyshard_offload:Offload"}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        if key == "path":
            imports |= {"pathlib:Path", "polyshard_offload:DiskSettings"}
            words.append(f"disk=DiskSettings(path=Path({value!r}))")
        else:
            words.append(f"{part}" if key == "fraction" else f'{key}="{value}"')
    return _Plugin("offload", tuple(imports), (f"offload = Offload({', '.join(words)})",))


def _sharding(settings: Settings, plugins: Sequence[str]) -> Iterator[str]:
    data = settings.mesh.data_axes
    is_whole = len(data) == len(settings.mesh.axes)
    part = f'"{data[0]}"' if len(data) == 1 else ", ".join(f'"{name}"' for name in data)
    yield "sharding = {"
    yield f'    "mesh": {"mesh" if is_whole else f"mesh[{part}]"},'
    if settings.reshard is not None:
        yield f'    "reshard_after_forward": {settings.reshard},'
    if settings.placement:
        yield f'    "shard_placement_fn": {settings.placement.partition(":")[2]},'
    if settings.bf16:
        yield '    "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),'
    if plugins:
        yield f'    "plugins": [{", ".join(plugins)}],'
    yield "}"


def _units(model: nn.Module, settings: Settings) -> Iterator[str]:
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    units = units_of(model, settings.units)
    members = [tuple(names[id(module)] for module in unit) for unit in units.values()]
    members.sort(key=lambda unit: (-unit[0].count("."), NUMBER.sub("*", unit[0])))
    for _, alike in groupby(members, lambda unit: (NUMBER.sub("*", unit[0]), len(unit))):
        yield from _calls(list(alike))
    yield "fully_shard(model, **sharding)"


def _calls(units: Sequence[Names]) -> Iterator[str]:
    """``fully_shard`` of units whose names differ in numbers: in a loop, where those count up."""
    names = [name for unit in units for name in unit]
    numbers = [int(found[0]) for found in map(NUMBER.findall, names) if len(found) == 1]
    counts_up = len(numbers) == len(names) and all(b == a + 1 for a, b in pairwise(numbers))
    if len(units) < 2 or not counts_up:
        for unit in units:
            calls = ", ".join(f'model.get_submodule("{name}")' for name in unit)
            yield f"fully_shard({calls if len(unit) == 1 else f'[{calls}]'}, **sharding)"
        return
    template = NUMBER.sub("{%s}", names[0])
    first, last, run = numbers[0], numbers[-1] + 1, len(units[0])
    steps = f"{first}, {last}, {run}" if run > 1 else f"{first}, {last}" if first else f"{last}"
    yield f"for i in range({steps}):"
    if run == 1:
        yield f'    fully_shard(model.get_submodule(f"{template % "i"}"), **sharding)'
    else:
        yield f'    blocks = [model.get_submodule(f"{template % "i + j"}") for j in range({run})]'
        yield "    fully_shard(blocks, **sharding)"
