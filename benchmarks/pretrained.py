"""A pretrained model from its files into shards: time, bytes from disk, memory.

    pip install "accelerate>=1.15"
    python -m benchmarks pretrained --ranks 4      (10 GB of disk; a few minutes)

A Llama of 4.95 GB in bfloat16, of random weights, is written once. Each way then fills the model
from a page cache without the files, in fresh processes that have loaded a tiny model before, so
that imports do not count. Ways take turns; medians of the slowest rank are reported. What ranks
hold at the end must have the same bits in all ways.

- ``polyshard``: the model on the meta device, ``fully_shard``, ``load_pretrained``.
- ``accelerate``: its FSDP2 with ``cpu_ram_efficient_loading``: ``from_pretrained`` gives rank 0
  weights, ``fsdp2_prepare_model`` broadcasts them. (``Accelerator.prepare`` calls that function on
  GPUs alone.)
- ``broadcast``: ``from_pretrained`` on rank 0, and torch's ``set_model_state_dict`` with
  ``broadcast_from_rank0``.
- ``dcp``: a checkpoint of torch's, converted before by ranks of the same number.
- ``dcp, safetensors``: ``torch.distributed.checkpoint`` with its ``HuggingFaceStorageReader``.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Event
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import polyshard
from benchmarks import harness
from benchmarks.harness import Found, local, run_alone, run_ranks, sharded
from polyshard_checkpoint import load_pretrained
from polyshard_cli.compare.training.memory import Meter, resident

SAMPLE_SECONDS = 0.005
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case(harness.Case, width=64, layers=2, turns=1):
    """What is measured."""

    ranks: int = 2
    width: int = 2048
    layers: int = 52
    turns: int = 3

    def measure(self) -> Found:
        """Medians of turns: of the slowest rank, of the one that reads or holds most, of sums."""
        ways = [way for way in WAYS if way != "accelerate" or importlib.util.find_spec(way)]
        with tempfile.TemporaryDirectory(prefix="polyshard-bench-") as name:
            root = Path(name)
            for size, each in (("tiny", self.quick()), ("whole", self)):
                run_alone(_write_model, each, root / size)
                run_ranks(self.ranks, _convert, root / size, root / f"{size}-dcp")
            turns: dict[str, list[Found]] = {way: [] for way in ways}
            for _ in range(self.turns):
                for way in ways:
                    _forget(root)
                    turns[way].append(run_ranks(self.ranks, _measure, way, root))
            total = sum(path.stat().st_size for path in (root / "whole").iterdir())
        bits = {one["bits"] for each in turns.values() for one in each}
        assert len(bits) == 1, f"ways differ in what they load: {bits}"
        return {
            "ranks": self.ranks,
            "turns": self.turns,
            "model_bytes": total,
            "ways": {
                way: {key: median(one[key] for one in each) for key in each[0] if key != "bits"}
                for way, each in turns.items()
            },
        }

    @property
    def config(self) -> Any:
        return LlamaConfig(
            vocab_size=32000,
            hidden_size=self.width,
            intermediate_size=self.width * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=16,
            num_key_value_heads=4,
            dtype=DTYPE,
        )


# Ways ---------------------------------------------------------------------------------------------


def _on_meta(folder: Path) -> Any:
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(AutoConfig.from_pretrained(folder))


def _polyshard(folder: Path, converted: Path) -> nn.Module:
    model = _on_meta(folder)
    sharded(model, model.model.layers, polyshard.fully_shard)
    load_pretrained(model, folder)
    return model  # type: ignore[no-any-return]


def _accelerate(folder: Path, converted: Path) -> nn.Module:
    utils: Any = importlib.import_module("accelerate.utils")
    asked = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    os.environ.update(asked, LOCAL_RANK=str(dist.get_rank()))
    plugin = utils.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        device=torch.device("cpu"),
        mixed_precision="no",
        is_main_process=not dist.get_rank(),
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    return utils.fsdp_utils.fsdp2_prepare_model(accelerator, model)  # type: ignore[no-any-return]


def _torch_shards(folder: Path) -> nn.Module:
    """FSDP2's model, its shards in memory, with the buffers that no file holds."""
    model = _on_meta(folder)
    sharded(model, model.model.layers, fully_shard)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model  # type: ignore[no-any-return]


def _broadcast(folder: Path, converted: Path) -> nn.Module:
    model, rank = _torch_shards(folder), dist.get_rank()
    whole = {} if rank else AutoModelForCausalLM.from_pretrained(folder).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    return model


def _dcp(folder: Path, converted: Path) -> nn.Module:
    model = _torch_shards(folder)
    dcp.load(get_model_state_dict(model), checkpoint_id=converted)
    return model


def _dcp_safetensors(folder: Path, converted: Path) -> nn.Module:
    model = _torch_shards(folder)
    reader: Any = dcp.HuggingFaceStorageReader(str(folder))
    dcp.load(get_model_state_dict(model), storage_reader=reader)
    return model


WAYS: dict[str, Callable[[Path, Path], nn.Module]] = {
    "polyshard": _polyshard,
    "accelerate": _accelerate,
    "broadcast": _broadcast,
    "dcp": _dcp,
    "dcp, safetensors": _dcp_safetensors,
}


# Files --------------------------------------------------------------------------------------------


def _write_model(case: Case, folder: Path) -> None:
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    auto.from_config(case.config, dtype=DTYPE).save_pretrained(folder, max_shard_size="1GB")


def _convert(folder: Path, converted: Path) -> None:
    dcp.save(get_model_state_dict(_polyshard(folder, converted)), checkpoint_id=converted)


def _forget(folder: Path) -> None:
    """Have the kernel read the files anew."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# Measuring ----------------------------------------------------------------------------------------


def _measure(way: str, root: Path) -> Found:
    fill = WAYS[way]
    fill(root / "tiny", root / "tiny-dcp")
    gc.collect()
    dist.barrier()
    meter, read = Meter(harness.CPU), _read_bytes()
    meter.begin_steps()
    with _anonymous_peak() as anonymous:
        begin = time.perf_counter()
        model = fill(root / "whole", root / "whole-dcp")
        spent = time.perf_counter() - begin
    peak = meter.read().peak_bytes
    own = {"read": _read_bytes() - read, "peak": peak, "anonymous": anonymous[0]}
    every: list[Any] = [None] * dist.get_world_size()
    shards = local(model.parameters())
    bits = sum(int(shard.view(torch.int16).sum(dtype=torch.int64)) for shard in shards)
    dist.all_gather_object(every, own | {"bits": bits, "seconds": spent})
    return {
        "seconds": max(each["seconds"] for each in every),
        **{f"{key}_bytes": max(each[key] for each in every) for key in own},
        **{f"{key}_bytes_sum": sum(each[key] for each in every) for key in own},
        "bits": sum(each["bits"] for each in every),
    }


def _read_bytes() -> int:
    """What storage had to fetch for this process (proc(5)), mapped files included."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


@contextmanager
def _anonymous_peak() -> Iterator[list[int]]:
    """The most anonymous memory above what there is now, sampled; mapped files are left out."""
    begin, done, found = resident("RssAnon:"), Event(), [0]

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            found[0] = max(found[0], resident("RssAnon:") - begin)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(sample)
        try:
            yield found
        finally:
            done.set()
    found[0] = max(found[0], resident("RssAnon:") - begin)
