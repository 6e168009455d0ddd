"""What the loops share: two local ranks, the choice of an engine, a model, and what is printed."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS = 4
ROWS = 4  # of a batch, on each rank
TOKENS = 8  # in a row
VOCABULARY = 64
WIDTH = 32

FullyShard = Callable[..., Any]
"""``fully_shard`` of either engine: they take the same keywords and mean the same by them."""


def engine(name: str) -> FullyShard:
    """The whole migration: which module ``fully_shard`` is imported from."""
    if name == "polyshard":
        from polyshard import fully_shard

        return fully_shard
    from torch.distributed.fsdp import fully_shard as torchs

    return torchs


def parser(about: str | None) -> argparse.ArgumentParser:
    """The one flag that all loops have; a loop may add its own."""
    made = argparse.ArgumentParser(description=about)
    made.add_argument("--engine", choices=("polyshard", "torch"), default="polyshard")
    return made


def main(loop: Callable[[argparse.Namespace], list[float]], flags: argparse.ArgumentParser) -> None:
    """Run ``loop`` on each rank; the first prints the losses, one a line.

    By itself this starts two ranks; under torchrun it is one of torchrun's. Every line is the mean
    over the ranks that have a loss, and shows every bit of it.
    """
    arguments = flags.parse_args()
    if "LOCAL_RANK" not in os.environ:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        sys.exit(subprocess.call([sys.executable, *torchrun, *sys.argv]))
    torch.manual_seed(0)
    losses = loop(arguments)
    if not dist.is_initialized():  # some clients take their process group down when they have ended
        dist.init_process_group("gloo")
    from_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(from_ranks, losses)
    if dist.get_rank() == 0:
        for values in zip(*filter(None, from_ranks), strict=True):
            print(f"loss {statistics.fmean(values)!r}")
    dist.barrier()  # a rank that leaves first takes connections away from those that still use them
    dist.destroy_process_group()


def admit_fsdp(accelerator: Any, plugin: Any) -> None:
    """Have accelerate take its FSDP2 route, which it offers on accelerators only, on the host too.

    Nothing of this is about the engine: with a GPU neither of the two needs it.
    """
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    # Each new look at the state copies the type from the partial one.
    for state in (PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def batch(step: int, rank: int) -> Tensor:
    """Tokens ``[ROWS, TOKENS]`` that are the same in every run."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)


def tiny_llama() -> nn.Module:
    """A Llama of ``transformers`` from a configuration: the same values everywhere."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": TOKENS,
        "attn_implementation": "eager",
    }
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**settings))
    return model


def shard_llama(model: nn.Module, fully_shard: FullyShard) -> nn.Module:
    """Every decoder layer a unit, and the rest one."""
    for module in model.modules():
        if type(module).__name__ == "LlamaDecoderLayer":
            fully_shard(module)
    fully_shard(model)
    return model
