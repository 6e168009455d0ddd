"""torchtitan's trainer: its model, checkpointing of activations, compilation and checkpoints.

It trains for four steps and saves after two, asynchronously; then a second trainer resumes from
there and must come to the same losses. The engine goes in through ``ModelSpec.parallelize_fn``.
Without an accelerator torchtitan 0.3 needs what ``_on_host`` and the classes below replace;
that is the same for both engines. It imports Triton, which need not find a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import common
import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def _on_host() -> None:
    """Without an accelerator torchtitan would set a CUDA device; other modules copy these names."""
    if not torch.accelerator.is_available():
        titan.device_type = "cpu"
        titan.device_module = SimpleNamespace(set_device=lambda _: None, device_count=lambda: 1)


_on_host()

from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import (  # noqa: E402
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.distributed.compile import apply_compile  # noqa: E402
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
    ScaledDotProductAttention,
)
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

SAVED = common.STEPS // 2


class Tokens(BaseDataLoader):  # type: ignore[misc]
    """Synthetic batches; the state is how many were given."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Nothing to choose."""

    def __init__(self, config: Config, *, dp_rank: int, **others: object) -> None:
        del config, others
        self.rank, self.step = dp_rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens = common.batch(self.step, self.rank)
            self.step += 1
            yield {"input": tokens}, tokens.roll(-1, dims=1)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from there."""
        self.step = state_dict["step"]


class NoTokenizer(BaseTokenizer):  # type: ignore[misc]
    """Tokens come as numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        """Nothing to choose."""

    def __init__(self, config: Config, **others: object) -> None:
        del config, others
        super().__init__()

    def encode(self, *args: object, **kwargs: object) -> list[int]:
        """Never called."""
        raise NotImplementedError

    def decode(self, *args: object, **kwargs: object) -> str:
        """Never called."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """As many as there are."""
        return common.VOCABULARY


class Losses(MetricsProcessor):  # type: ignore[misc]
    """Keeps losses. torchtitan's own asks for the memory of a GPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """Nothing to choose."""

    def __init__(self, config: Config, **others: object) -> None:
        del config, others
        self.losses: list[float] = []
        self.ntokens_since_last_log, self.data_loading_times = 0, list[float]()
        self.color = SimpleNamespace(blue="", red="", reset="")
        peak = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        self.device_memory_monitor = SimpleNamespace(
            device_name="host", get_peak_stats=lambda: peak
        )

    def should_log(self, step: int) -> bool:
        """Each step."""
        del step
        return True

    def log(self, step: int, global_avg_loss: float, *others: object, **more: object) -> None:
        """The mean over all ranks."""
        del step, others, more
        self.losses.append(global_avg_loss)

    def close(self) -> None:
        """Nothing is open."""


class HostTrainer(Trainer):  # type: ignore[misc]
    """torchtitan's, with its loop but for profiling and time-outs, which gloo does not take."""

    def train(self, until: int) -> list[float]:
        """Load what there is, then train and save until a step."""
        self.checkpointer.load(step=self.config.checkpoint.load_step)
        batches = self.batch_generator(self.dataloader)
        while self.step < until:
            self.step += 1
            self.train_step(batches)
            self.checkpointer.save(self.step, last_step=False)
        losses: list[float] = self.metrics_processor.losses
        self.checkpointer.maybe_wait_for_saving()
        self.close()
        return losses


def parallelize(fully_shard: common.FullyShard, model: nn.Module, **given: Any) -> nn.Module:
    """As torchtitan does for Llama: checkpointing, compilation of each block, then sharding."""
    if given["ac_config"] is not None:
        given["ac_config"].build(dump_folder=given["dump_folder"]).apply(model)
    if given["compile_config"].enable:
        compiled, dims = given["compile_config"], given["parallel_dims"]
        apply_compile(model, compile_config=compiled, parallel_dims=dims)
    mesh = given["parallel_dims"].get_mesh(["fsdp"])
    parts: Any = model
    fully_shard(parts.tok_embeddings, mesh=mesh, reshard_after_forward=True)
    fully_shard([parts.norm, parts.lm_head], mesh=mesh, reshard_after_forward=False)
    for block in parts.layers.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    disable_fsdp_gradient_division(model)  # torchtitan divides by the number of tokens itself
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    return model


def settings(arguments: argparse.Namespace, folder: str) -> Trainer.Config:
    """torchtitan's configuration of its smallest Llama."""
    fully_shard = common.engine(arguments.engine)
    spec = model_registry("debugmodel")
    model = spec.model
    model.layers = model.layers[:2]
    for _, _, parent, name in list(model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())  # flex has no backward on a CPU
    checkpointing = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
    return HostTrainer.Config(
        model_spec=replace(
            spec, parallelize_fn=lambda model, **given: parallelize(fully_shard, model, **given)
        ),
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(),
        metrics=Losses.Config(),
        optimizer=default_adamw(lr=1e-2),
        training=TrainingConfig(
            local_batch_size=common.ROWS,
            seq_len=common.TOKENS,
            steps=common.STEPS + 1,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(enable=True, interval=SAVED, async_mode="async"),
        activation_checkpoint=checkpointing[arguments.checkpointing],
        compile=CompileConfig(
            enable=arguments.compile, components=["model"], backend=arguments.backend
        ),
        debug=DebugConfig(seed=0, deterministic=True),
    )


def loop(arguments: argparse.Namespace) -> list[float]:
    """All steps; then those after the saved one again, from the checkpoint."""
    dist.init_process_group("gloo" if titan.device_type == "cpu" else None)
    shared: list[Any] = [None]
    with tempfile.TemporaryDirectory() as folder:
        shared[0] = folder
        dist.broadcast_object_list(shared)
        config = settings(arguments, shared[0])
        whole = HostTrainer(config).train(common.STEPS)
        config = settings(arguments, shared[0])
        config.checkpoint.load_step = SAVED
        resumed = HostTrainer(config).train(common.STEPS)
        dist.barrier()
    if resumed != whole[SAVED:]:
        raise AssertionError(f"resumed, losses are {resumed} instead of {whole[SAVED:]}")
    return whole


if __name__ == "__main__":
    flags = common.parser(__doc__)
    kinds = ("none", "full", "selective")
    flags.add_argument("--checkpointing", choices=kinds, default="selective")
    flags.add_argument("--compile", action="store_true", help="each block by itself")
    flags.add_argument("--backend", default="aot_eager")
    common.main(loop, flags)
