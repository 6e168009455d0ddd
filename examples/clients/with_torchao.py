"""torchao: weights that go through FSDP2's protocol for tensor classes.

``--kind float8``: linear layers whose weights are gathered as float8, with scales agreed over all
ranks before each step; emulated here, so it runs anywhere. ``--kind int8``: weights that are int8
at rest and stochastically rounded.
"""

from __future__ import annotations

import argparse

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def model_of(kind: str) -> nn.Sequential:
    """Two layers with converted weights around an activation."""
    model = nn.Sequential(
        nn.Linear(common.WIDTH, 2 * common.WIDTH, bias=False),
        nn.GELU(),
        nn.Linear(2 * common.WIDTH, common.WIDTH, bias=False),
    )
    if kind == "float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        settings = Float8LinearConfig(emulate=True)
        convert_to_float8_training(model, config=settings)
    else:
        from torchao.prototype.quantized_training import int8_weight_only_quantized_training
        from torchao.quantization import quantize_

        quantize_(model, int8_weight_only_quantized_training())
    return model


def loop(arguments: argparse.Namespace) -> list[float]:
    """One unit a layer; for float8 the scales of all weights are computed at once."""
    dist.init_process_group("gloo")
    fully_shard = common.engine(arguments.engine)
    model = model_of(arguments.kind)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    losses = []
    for step in range(common.STEPS):
        tokens = common.batch(step, dist.get_rank()).flatten()
        x = F.one_hot(tokens, common.VOCABULARY).float()[:, : common.WIDTH]
        loss: Tensor = F.mse_loss(model(x), x.roll(1, dims=0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if arguments.kind == "float8":
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    flags = common.parser(__doc__)
    flags.add_argument("--kind", choices=("float8", "int8"), default="float8")
    common.main(loop, flags)
