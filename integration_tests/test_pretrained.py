"""Pretrained models beside plugins: bytes go from files to where shards rest, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install transformers")

import torch
from pretrained_models import ARCHITECTURES, read_bytes, resident, shard, train, values
from torch import Tensor
from tp_models import meshes
from transformers import LlamaConfig, LlamaForCausalLM

from polyshard_checkpoint import load_pretrained, save_pretrained
from polyshard_offload import DiskSettings, Offload
from polyshard_quantized import QuantizedComm
from polyshard_tensor_parallel import TensorParallel, llama_plan
from polyshard_testing import World, ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
LLAMA = ARCHITECTURES["Llama"]


@dataclass(frozen=True)
class Stack:
    """Four ranks, and what is between a shard and its parameter."""

    dp: int = 4
    tp: int = 1
    replicas: int = 0
    tied: bool = False
    plugin: Callable[[str], Any] | None = None

    def build(self, folder: Path, disk: str) -> tuple[Any, Any]:
        """A model on the meta device, and the plugin."""
        model = LLAMA.on_meta(folder)
        mesh = meshes(self.dp, self.tp, self.replicas)
        plugin = self.plugin and self.plugin(disk)
        plugins = [] if plugin is None else [plugin]
        if self.tp > 1:
            plugins.append(TensorParallel(llama_plan(), mesh=mesh["tp"]))
            plugins[-1].apply(model)
        axes = ("replicas", "dp") if self.replicas else ("dp",)
        return shard(model, mesh=mesh[axes], plugins=plugins), plugin


def host(disk: str) -> Offload:
    return Offload(params="host", optimizer="host")


def on_disk(disk: str) -> Offload:
    return Offload(params="disk", optimizer="disk", disk=DiskSettings(path=Path(disk)))


def quantized(disk: str) -> QuantizedComm:
    return QuantizedComm()


STACKS = {
    "tp": Stack(2, 2),
    "tp, tied": Stack(2, 2, tied=True),
    "tp only": Stack(1, 2, 2),
    "hsdp": Stack(2, 1, 2),
    "hsdp, tied": Stack(2, 1, 2, tied=True),
    "host": Stack(plugin=host),
    "disk": Stack(plugin=on_disk),
    "host x tp": Stack(2, 2, plugin=host),
    "quantized x tp": Stack(2, 2, plugin=quantized),
}


def weights_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors*")}


def filled(
    rank: int, size: int, stack: Stack, base: Path, out: Path, disk: str
) -> tuple[dict[str, Tensor], int, list[float]]:
    """What it holds, its place among the data, and losses."""
    model, plugin = stack.build(base, disk)
    load_pretrained(model, base)
    held = values(model)
    save_pretrained(model, out)
    place, parts = rank // stack.tp, size // stack.tp
    wrap = plugin.wrap if isinstance(plugin, Offload) else None
    return held, place, train(model, LLAMA, place, parts, wrap)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", STACKS)
@pytest.mark.filterwarnings("ignore")
def test_what_is_loaded_and_saved_is_in_the_files(world4: World, name: str, tmp_path: Path) -> None:
    stack, base, out = STACKS[name], tmp_path / "base", tmp_path / "out"
    LLAMA.build(tied=stack.tied).save_pretrained(base)
    alone: Any = LlamaForCausalLM.from_pretrained(base)
    wanted = values(alone)
    found = world4.run(filled, stack, base, out, str(tmp_path), timeout=200.0)
    for held, _, _ in found:
        assert held.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(held[key], value), key
    assert weights_of(out) == weights_of(base)
    losses = torch.tensor(list({place: each for _, place, each in found}.values())).mean(0)
    tolerance = 3e-2 if "quantized" in name else 1e-4
    expected = torch.tensor(train(alone, LLAMA))
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)


WIDE: dict[str, Any] = {
    "vocab_size": 8001, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip


@ranks(2)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts with Linux's /proc")
def test_bytes_go_straight_to_their_tier(rank: int, size: int, tier: str, tmp_path: Path) -> None:
    """A rank reads its part once; on the host it holds no more than that and a unit.

    Resident memory counts pages of the file that the disk tier maps, which the kernel may drop.
    """
    config = LlamaConfig(**WIDE)
    if rank == 0:
        LlamaForCausalLM(config).save_pretrained(tmp_path)
    torch.distributed.barrier()

    def built() -> Any:
        make = {"host": host, "disk": on_disk}[tier]
        with torch.device("meta"):
            return shard(LlamaForCausalLM(config), plugins=[make(str(tmp_path))])

    load_pretrained(built(), tmp_path)  # imports, and code that the kernel had let go of
    model = built()
    total = sum(p.numel() * 4 for p in model.parameters())
    unit = 2 * 8001 * 512 * 4
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    read, held = read_bytes(), resident("VmRSS:")
    load_pretrained(model, tmp_path)
    assert read_bytes() - read <= 1.05 * total / size
    if tier == "host":
        assert resident("VmHWM:") - held <= total / size + unit
