"""A trainer whose ranks publish their weights after each step to a generator in another process.

    torchrun --nproc-per-node 2 examples/publish.py

Rank 0 starts the generator, which computes with the newest version in bfloat16 and answers with the
largest difference from what the trainer computes with its rounded weights. That is zero: both have
the same bits.
"""

import multiprocessing
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from polyshard import fully_shard
from polyshard_publish import Publisher, Receiver, ReceiverServer

WIDTH, STEPS = 64, 5


def toy() -> nn.Sequential:
    """The model of both processes."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def generate(trainer: Connection) -> None:
    """Say the address of a receiver, then answer inputs with what each version makes of them."""
    receiver, model = Receiver(), toy()
    with ReceiverServer(receiver) as server:
        trainer.send(server.address)
        for version in range(STEPS):
            inputs = trainer.recv()
            receiver.wait(version, timeout_seconds=300)
            with receiver.serving() as served, torch.no_grad():
                answer = functional_call(model, dict(served.tensors), inputs)
            trainer.send((served.version, answer.tolist()))  # no tensor: it would go with us


def main() -> None:
    """Train, publish and compare."""
    dist.init_process_group("gloo")
    context = multiprocessing.get_context("spawn")
    generator, theirs = context.Pipe()
    address: list[str] = [""]
    if dist.get_rank() == 0:
        context.Process(target=generate, args=(theirs,), daemon=True).start()
        theirs.close()  # so that its end is noticed here
        address = [generator.recv()]
    dist.broadcast_object_list(address)

    torch.manual_seed(0)
    model = toy()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(8, WIDTH)
    with Publisher(model, to=address[0], dtype=torch.bfloat16, keep="values") as publisher:
        for version in range(STEPS):
            published = publisher.publish(version)
            whole = {name: tensor.clone() for name, tensor in publisher.tensors()}  # to compare
            if dist.get_rank() == 0:
                generator.send(inputs.bfloat16())
                served, answer = generator.recv()
                mine = functional_call(toy(), whole, (inputs.bfloat16(),))
                difference = (torch.tensor(answer) - mine).abs().max().item()
                print(f"version {served}: {published.value_bytes:,} bytes, differs by {difference}")
                assert (served, difference) == (version, 0.0)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
