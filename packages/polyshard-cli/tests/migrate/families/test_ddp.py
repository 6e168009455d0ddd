"""DDP: the wrapper becomes one unit, whose ranks must have the same values."""

from __future__ import annotations

import pytest
from migrate_runs import migrated, unchanged


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("model", "model, plugins=[SameValues()]"),
        ("model, device_ids=[rank], output_device=rank", "model, plugins=[SameValues()]"),
        ("model, [rank], rank, 0", "model, plugins=[SameValues()]"),
        ("model, find_unused_parameters=True", "model, plugins=[SameValues()]"),
        ("model, process_group=None", "model, plugins=[SameValues()]"),
        ("module=model, device_mesh=mesh", "model, mesh=mesh, plugins=[SameValues()]"),
        ("device_mesh=mesh, module=model", "model, mesh=mesh, plugins=[SameValues()]"),
    ],
)
@pytest.mark.parametrize(
    ("imports", "name"),
    [
        ("from torch.nn.parallel import DistributedDataParallel as DDP\n", "DDP"),
        ("import torch\n", "torch.nn.parallel.DistributedDataParallel"),
        ("from torch import nn\n", "nn.parallel.DistributedDataParallel"),
    ],
)
def test_calls(imports: str, name: str, arguments: str, expected: str) -> None:
    found = migrated(f"{imports}\nmodel = {name}({arguments})\n")
    assert found.text.endswith(f"\nmodel = fully_shard({expected})\n")
    assert "from polyshard import SameValues, fully_shard\n" in found.text
    assert not found.left


@pytest.mark.parametrize(
    ("arguments", "term"),
    [
        ("process_group=group", "process_group"),
        ("mixed_precision=policy", "mixed_precision"),
        ("delay_all_reduce_named_params=x", "delay_all_reduce_named_params"),
        ("param_to_hook_all_reduce=x", "param_to_hook_all_reduce"),
        ("**options", "DistributedDataParallel"),
    ],
)
def test_what_needs_a_hand_stays(arguments: str, term: str) -> None:
    found = unchanged(
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        f"model = DDP(model, {arguments})\n"
    )
    assert found.left == [(2, term)]


def test_methods_and_types_are_listed() -> None:
    found = migrated("""
        from torch.nn.parallel import DistributedDataParallel as DDP
        model = DDP(model)
        with model.no_sync(): ...
        save(model.module.state_dict())
        model.register_comm_hook(None, hook)
        isinstance(model, DDP)
        model.require_backward_grad_sync = last
    """)
    assert found.left == [
        (4, "module"),
        (5, "register_comm_hook"),
        (6, "DistributedDataParallel"),
        (7, "require_backward_grad_sync"),
    ]


@pytest.mark.parametrize("module", ["model", "model.to(rank)"])
def test_state_dicts_of_the_module_that_was_wrapped_are_listed(module: str) -> None:
    found = migrated(f"""
        from torch.nn.parallel import DistributedDataParallel as DDP
        model = build()
        model.load_state_dict(old)
        ddp_model = DDP({module})
        model.train()
        save(model.state_dict())
    """)
    assert found.left == [(6, "state_dict")]


@pytest.mark.parametrize("target", ["model: nn.Module", "model = self.model", "self.model = model"])
def test_methods_are_listed_however_the_wrapper_is_assigned(target: str) -> None:
    found = migrated(f"""
        from torch.nn.parallel import DistributedDataParallel as DDP
        class Trainer:
            def __init__(self, net):
                {target} = DDP(net)
                save(model.state_dict())
    """)
    assert found.left == [(5, "state_dict")]


@pytest.mark.parametrize(
    "wrapped", ["DDP(net) if several else net", "torch.compile(DDP(net))", "DDP(net).to(rank)"]
)
def test_methods_are_listed_whatever_is_around_the_wrapper(wrapped: str) -> None:
    found = migrated(f"""
        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP
        model = {wrapped}
        save(model.module.state_dict())
    """)
    assert found.left == [(4, "module")]


def test_buffers_are_spoken_of_without_a_keyword() -> None:
    """DDP broadcasts those of rank 0 by default."""
    found = migrated("from torch.nn.parallel import DistributedDataParallel as DDP\nDDP(net)\n")
    assert "Buffers are each rank's own" in found.messages()


def test_state_dicts_elsewhere_are_spoken_of() -> None:
    found = migrated("""
        from torch.nn.parallel import DistributedDataParallel as DDP
        def wrapped(net): return DDP(net)
        def save(model): torch.save(model.state_dict(), "model.pt")
        save(wrapped(net))
    """)
    assert "state dicts are sharded, wherever the model goes" in found.messages()


def test_an_optimizer_made_before_is_not_passed_over() -> None:
    found = unchanged("""
        from torch import nn, optim
        model = build()
        optimizer = optim.AdamW(params=model.parameters())
        model = nn.parallel.DistributedDataParallel(model)
    """)
    assert found.left == [(4, "DistributedDataParallel")]


@pytest.mark.parametrize(
    "made",
    [
        "optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()))",
        "optim.AdamW([p for p in model.parameters() if p.requires_grad])",
        "optim.AdamW([{'params': model.head.parameters()}, {'params': model.parameters()}])",
    ],
)
@pytest.mark.parametrize("module", ["model", "model.to(rank)", "model.cuda().train()"])
def test_an_optimizer_is_seen_however_it_gets_the_parameters(made: str, module: str) -> None:
    found = unchanged(f"""
        from torch import nn, optim
        model = build()
        optimizer = {made}
        model = nn.parallel.DistributedDataParallel({module})
    """)
    assert found.left == [(4, "DistributedDataParallel")]


@pytest.mark.parametrize(
    "made", ["model.configure_optimizers(0.1, lr)", "make_optimizer(args, model=model)"]
)
def test_an_optimizer_is_seen_that_a_function_makes(made: str) -> None:
    found = unchanged(f"""
        from torch import nn
        model = build()
        optimizer = {made}
        model = nn.parallel.DistributedDataParallel(model)
    """)
    assert found.left == [(4, "DistributedDataParallel")]


def test_an_optimizer_of_parameters_that_were_kept_is_seen() -> None:
    found = unchanged("""
        from torch import nn, optim
        model = build()
        kept = [p for p in model.parameters()]
        model = nn.parallel.DistributedDataParallel(model.to(rank))
        optimizer = optim.AdamW(kept)
    """)
    assert found.left == [(4, "DistributedDataParallel")]


def test_variables_that_functions_pass_on_are_not_followed_for_ever() -> None:
    found = migrated("""
        from torch import nn
        model = build()
        kept = list(model.parameters())
        def one():
            global kept
            kept = f(kept)
        def two():
            global kept
            kept = g(kept)
        model = nn.parallel.DistributedDataParallel(model)
    """)
    assert "fully_shard(model" in found.text


def test_what_else_is_asked_of_parameters_is_no_optimizer() -> None:
    found = migrated("""
        from torch import nn, optim
        model = build()
        count = sum(p.numel() for p in model.parameters())
        print(count)
        model = nn.parallel.DistributedDataParallel(model.to(rank))
        optimizer = optim.AdamW(model.parameters())
    """)
    assert not found.left


def test_a_rebound_name_stays() -> None:
    found = unchanged("""
        from torch.nn.parallel import DistributedDataParallel as DDP
        def wrap(DDP): return DDP(model)
        if fast:
            DDP = None
        model = DDP(model)
    """)
    assert found.left == [(5, "DistributedDataParallel")]
