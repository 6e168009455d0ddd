"""Train a small language model on real text, its weights sharded over several processes.

By itself it starts two local processes; under torchrun it is one of torchrun's::

    python examples/train_lm.py --steps 200
    torchrun --nproc-per-node 4 examples/train_lm.py --steps 200
    python examples/train_lm.py --help

The part that shards is four lines (``polyshard_cli/compare/engines/sharded.py``)::

    from polyshard import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

Everything around it is ordinary PyTorch: AdamW, ``clip_grad_norm_``, distributed checkpoint. The
loop is ``polyshard_demo/train.py``.
"""

import typer

from polyshard_demo.command import train

if __name__ == "__main__":
    typer.run(train)
