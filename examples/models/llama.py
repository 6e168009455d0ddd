"""A Llama of ``transformers`` in a folder of safetensors: begun, loaded in shards, exported.

python examples/models/llama.py FOLDER      writes one with random weights, to begin with
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from polyshard import fully_shard
from polyshard_checkpoint.safetensors import load_safetensors, save_safetensors
from polyshard_tensor_parallel import TensorParallel, llama_plan


def config(**changes: Any) -> LlamaConfig:
    """What real ones have: grouped keys, a head tied to an embedding, an odd vocabulary."""
    settings: dict[str, Any] = {
        "vocab_size": 259,  # bytes, and three more: begin, end, padding
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**settings | changes)


def begin(folder: Path, **changes: Any) -> None:
    """Write a folder as one that was downloaded; ``changes`` are those of the config."""
    torch.manual_seed(0)
    LlamaForCausalLM(config(**changes)).save_pretrained(folder)


def outline(folder: Path) -> LlamaForCausalLM:
    """The model that ``folder`` describes, on the meta device: it takes no memory."""
    described = LlamaConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(described)
    # Computed from the config, and therefore in no file: made outside of the meta device.
    model.model.rotary_emb = LlamaRotaryEmbedding(described)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def load(folder: Path, mesh: DeviceMesh, plugins: Sequence[Any] = ()) -> LlamaForCausalLM:
    """Each rank reads its part, and no rank ever holds the whole.

    Args:
        folder: with the config and the weights.
        mesh: ``("dp", "tp")``: the model is sharded over one, its layers divided over the other.
        plugins: beside tensor parallelism.
    """
    model = outline(folder)
    tensor_parallel = TensorParallel(llama_plan(), mesh=mesh["tp"])
    tensor_parallel.apply(model)
    shard(model, mesh=mesh["dp"], plugins=[tensor_parallel, *plugins])
    load_safetensors(model, folder)
    return model


def meshes(tp: int) -> DeviceMesh:
    """All ranks, ``tp`` of which divide each layer: ``("dp", "tp")``."""
    shape = (dist.get_world_size() // tp, tp)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def shard(model: nn.Module, **settings: Any) -> None:
    """Every decoder layer is a unit, and the rest is one."""
    for module in model.modules():
        if type(module).__name__ == "LlamaDecoderLayer":
            fully_shard(module, **settings)
    fully_shard(model, **settings)


def export(model: LlamaForCausalLM, folder: Path, **settings: Any) -> None:
    """Write what ``from_pretrained`` takes; each rank writes its part.

    Args:
        model: sharded.
        folder: where to.
        settings: of ``save_safetensors``.
    """
    save_safetensors(model, folder, **settings)
    if dist.get_rank() == 0:
        model.config.dtype = settings.get("dtype", model.dtype)
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
    dist.barrier()


if __name__ == "__main__":
    begin(Path(sys.argv[1]))
