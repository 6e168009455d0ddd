"""Ready-made plans: the demonstration model, and Llama of ``transformers``.

Attention sees local tensors (``use_local_output``), because ``DTensor`` has no sharding strategy
for the flash-attention kernel on the CPU; each rank has its share of the heads.
"""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from polyshard_tensor_parallel.plans.plan import Heads, Plan


def demo_plan(*, sequence_parallel: bool = False, loss_parallel: bool = False) -> Plan:
    """For ``polyshard_demo.model.LanguageModel``, tied or not.

    Args:
        sequence_parallel: cut activations between the linear layers along the sequence, whose
            length the ranks must divide.
        loss_parallel: leave logits cut along the vocabulary, as a ``DTensor`` for
            ``torch.distributed.tensor.parallel.loss_parallel``.
    """
    styles: dict[str, ParallelStyle] = {
        "embedding": _embedding(sequence_parallel),
        **_columns("blocks.*.attention", "query", "key", "value"),
        "blocks.*.attention.output": _rows(sequence_parallel),
        **_columns("blocks.*.feed_forward", "gate", "up"),
        "blocks.*.feed_forward.down": _rows(sequence_parallel),
        "head": _head(sequence_parallel, loss_parallel),
    }
    if sequence_parallel:
        for name in ("blocks.*.attention", "blocks.*.feed_forward"):
            styles[f"{name}_norm"] = SequenceParallel()
            styles[name] = _whole_input()
        styles["norm"] = SequenceParallel(use_local_output=True)
    heads = Heads("blocks.*.attention", "head_width", ("query", "key", "value"))
    return Plan(styles, (heads,))


def llama_plan(*, loss_parallel: bool = False) -> Plan:
    """For ``transformers.LlamaForCausalLM``, with or without grouped keys; tied or not.

    Args:
        loss_parallel: as in :func:`demo_plan`; the model must then not compute the loss itself.
    """
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    styles: dict[str, ParallelStyle] = {
        "model.embed_tokens": _embedding(False),
        **_columns(attention, "q_proj", "k_proj", "v_proj"),
        f"{attention}.o_proj": RowwiseParallel(),
        **_columns(mlp, "gate_proj", "up_proj"),
        f"{mlp}.down_proj": RowwiseParallel(),
        "lm_head": _head(False, loss_parallel),
    }
    return Plan(styles, (Heads(attention, "head_dim", ("q_proj", "k_proj", "v_proj")),))


def _columns(parent: str, *children: str) -> dict[str, ParallelStyle]:
    return {f"{parent}.{child}": ColwiseParallel() for child in children}


def _rows(sequence_parallel: bool) -> RowwiseParallel:
    return RowwiseParallel(output_layouts=Shard(1)) if sequence_parallel else RowwiseParallel()


def _embedding(sequence_parallel: bool) -> RowwiseParallel:
    output = Shard(1) if sequence_parallel else Replicate()
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=output)


def _head(sequence_parallel: bool, loss_parallel: bool) -> ColwiseParallel:
    return ColwiseParallel(
        input_layouts=Shard(1) if sequence_parallel else Replicate(),
        output_layouts=Shard(-1) if loss_parallel else Replicate(),
        use_local_output=not loss_parallel,
    )


def _whole_input() -> PrepareModuleInput:
    return PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
    )
