"""The engine and its plugins on the simulated accelerator: the bits of the CPU over gloo."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from simulated import CASES, OTHERS, compare

from polyshard_testing import World

NEEDS = {
    "int8": "polyshard_quantized",
    "offload to host": "polyshard_offload",
    "offload to host, moved": "polyshard_offload",
    "optimizer on host": "polyshard_offload",
    "offload to disk": "polyshard_offload",
    "muon": "polyshard_optimizers",
    "muon hsdp": "polyshard_optimizers",
    "tensor_parallel": "polyshard_tensor_parallel",
    "reproducible": "polyshard_reproducible",
}
SIZES = {
    "hsdp": (4,), "hsdp bf16": (4,), "blocks": (4,), "muon hsdp": (4,),
    "plain": (1, 2, 3, 4), "bf16": (2, 3), "int8": (2, 4), "muon": (2, 3),
    "reproducible": (2, 4), "tensor_parallel": (2, 4), "pipelining": (2, 4),
}  # fmt: skip
IN_THE_GATE = {
    ("bf16", 2), ("accumulation", 2), ("offload to host, moved", 2), ("hsdp", 4),
}  # fmt: skip


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    sim = pytest.importorskip("polyshard_sim", reason="needs polyshard-sim")
    if not sim.is_buildable():
        pytest.skip("needs Linux, a C++ compiler and ninja to build the simulated device")
    found = {size: World(size, device="sim") for size in (1, 2, 3, 4)}
    yield found
    for world in found.values():
        world.close()


def cells() -> Iterator[object]:
    for name in (*CASES, *OTHERS):
        for size in SIZES.get(name, (2,)):
            thorough = () if (name, size) in IN_THE_GATE else (pytest.mark.thorough,)
            yield pytest.param(name, size, id=f"{name}, {size} ranks", marks=thorough)


@pytest.mark.parametrize(("name", "size"), list(cells()))
def test_it_trains_as_on_the_cpu(worlds: dict[int, World], name: str, size: int) -> None:
    needed = NEEDS.get(name, "polyshard")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    worlds[size].run(compare, name, timeout=120)
