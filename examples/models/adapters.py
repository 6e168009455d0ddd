"""LoRA and QLoRA with ``peft``: adapters on a frozen base, exported as ``peft`` has them.

python examples/models/adapters.py runs/base runs/adapters
python examples/models/adapters.py runs/base runs/adapters --nf4
python examples/models/adapters.py runs/base runs/adapters --merged runs/merged
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama
import loop
import ranks
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM

from polyshard_checkpoint.safetensors import load_safetensors, save_safetensors

LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}
LR = 1e-2
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tune(
    base: Path, out: Path, *, steps: int, nf4: bool = False, merged: Path | None = None
) -> list[float]:
    """Adapters for the model of one folder into another; the losses."""
    if nf4 and merged is not None:
        raise ValueError("Adapters do not merge into NF4 weights: merge them into the base itself.")
    model = sharded(base, nf4=nf4)
    optimizer = torch.optim.AdamW(trained(model), lr=LR)
    losses = loop.train(
        model, [optimizer], steps, init_device_mesh("cpu", (dist.get_world_size(),))
    )
    export(model, out)
    if merged is not None:
        merge(model)
        tuned: Any = model.base_model.model
        llama.export(tuned, merged, names=name_of_merged)
    return losses


def sharded(base: Path, *, nf4: bool = False) -> PeftModel:
    """Frozen parameters and adapters share units. A base in four bits is built on every rank."""
    model = with_adapters(in_four_bits(base) if nf4 else llama.outline(base))
    llama.shard(model)
    if not nf4:
        load_safetensors(model, base, names=name_in_base)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    """What the optimizer gets: the adapters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def with_adapters(model: LlamaForCausalLM) -> PeftModel:
    """The same adapters on every rank, whole: they are small. The base may be on meta."""
    made: PeftModel = get_peft_model(model, LoraConfig(target_modules=TARGETS, **LORA))
    torch.manual_seed(0)
    for layer in adapted(made):
        for part in (layer.lora_A, layer.lora_B):
            part.to_empty(device="cpu")
        layer.reset_lora_parameters("default", init_lora_weights=True)
    return made


def in_four_bits(folder: Path) -> LlamaForCausalLM:
    """The linear layers of the blocks as NF4; each rank quantizes the whole, and keeps its part."""
    from torchao.quantization import NF4Tensor

    model = LlamaForCausalLM.from_pretrained(folder)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            packed = NF4Tensor.from_tensor(
                module.weight.detach(), block_size=64, scaler_block_size=64
            )
            module.weight = nn.Parameter(packed, requires_grad=False)
    return model


def adapted(model: nn.Module) -> Iterator[Any]:
    """Linear layers that have an adapter."""
    return (module for module in model.modules() if isinstance(module, LoraLayer))


def name_in_base(name: str) -> str | None:
    """What the base's files call a parameter of the adapted model; none of the adapters."""
    return None if "lora_" in name else name_of_merged(name.removeprefix("base_model.model."))


def name_of_merged(name: str) -> str | None:
    """The same, for the model inside."""
    return None if "lora_" in name else name.replace(".base_layer.", ".")


def name_in_peft(name: str) -> str | None:
    """What ``peft`` calls a parameter of an adapter in files; none of the base."""
    return name.replace(".default.", ".") if "lora_" in name else None


def export(model: PeftModel, folder: Path) -> None:
    """Write what ``PeftModel.from_pretrained`` takes; each rank writes its part."""
    save_safetensors(model, folder, names=name_in_peft, stem="adapter_model")
    if dist.get_rank() == 0:
        model.peft_config["default"].save_pretrained(str(folder))
    dist.barrier()


@torch.no_grad()
def merge(model: PeftModel) -> None:
    """Add each adapter to the weight it adapts, on shards: each rank computes its rows."""
    for layer in adapted(model):
        layer.base_layer.weight.add_(layer.get_delta_weight("default"))


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description="Train adapters for a Llama.")
    flags.add_argument("base", type=Path, help="folder of the model to begin with")
    flags.add_argument("out", type=Path, help="folder for the adapters")
    flags.add_argument("--steps", type=int, default=50)
    flags.add_argument("--nf4", action="store_true", help="the base rests and travels in four bits")
    flags.add_argument("--merged", type=Path, help="folder for the model with adapters merged in")
    given = flags.parse_args()
    settings = {"steps": given.steps, "nf4": given.nf4, "merged": given.merged}
    ranks.run(lambda: tune(given.base, given.out, **settings), 2)
