"""Operators of transformers and codecs give the CPU's numbers, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyshard_sim.testing import run, sim

FLOATS = [torch.float32, torch.bfloat16]
SHAPES = [(2, 6, 16), (16, 16), (16,)]


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_gradients(function: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Its value, and gradients of its inputs."""

    def call(*inputs: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        value = function(*leaves)
        weights = torch.arange(value.numel(), device=value.device).view(value.shape) % 5
        (value * weights).sum().backward()
        return [value.detach(), *(x.grad for x in leaves if x.grad is not None)]

    return call


def modules() -> dict[str, Callable[..., Any]]:
    return {
        "linear": F.linear,
        "layer_norm": lambda x, w, b: F.layer_norm(x, (16,), b, b),
        "rms_norm": lambda x, w, b: F.rms_norm(x, (16,), b),
        "softmax": lambda x, w, b: x.softmax(-1),
        "log_softmax": lambda x, w, b: x.log_softmax(-1),
        "gelu": lambda x, w, b: F.gelu(x),
        "gelu_tanh": lambda x, w, b: F.gelu(x, approximate="tanh"),
        "silu": lambda x, w, b: F.silu(x),
        "relu": lambda x, w, b: F.relu(x),
        "tanh": lambda x, w, b: torch.tanh(x),
        "matmul": lambda x, w, b: x @ w.t(),
        "bmm": lambda x, w, b: torch.bmm(x, x.transpose(1, 2)),
        "einsum": lambda x, w, b: torch.einsum("bsd,ed->bse", x, w),
        "rotary": lambda x, w, b: torch.cat([-x[..., 8:], x[..., :8]], -1) * b + x * b.cos(),
        "mean": lambda x, w, b: x.mean(1),
        "norm": lambda x, w, b: torch.linalg.vector_norm(x, dim=-1),
        "cumsum": lambda x, w, b: x.cumsum(1),
        "where": lambda x, w, b: torch.where(x > 0, x, b),
        "conv1d": lambda x, w, b: F.conv1d(x, w[:4, :6, None]) if x.shape[1] == 6 else x,
        "chunk": lambda x, w, b: torch.cat([c * 2 for c in x.chunk(4, -1)], 0),
        "gather": lambda x, w, b: x.gather(
            1, torch.zeros(2, 6, 16, dtype=torch.int64).to(x.device)
        ),
    }


def attention(x: Tensor, causal: bool, mask: bool) -> list[Tensor]:
    def attend(q: Tensor) -> Tensor:
        given = torch.ones(6, 6, device=q.device).tril().bool() if mask else None
        heads = q.view(2, 6, 4, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, given, is_causal=causal)

    return with_gradients(attend)(x)


def losses(x: Tensor) -> list[Tensor]:
    target = (torch.arange(12) % 16).to(x.device)
    target[3] = -100
    flat = x.reshape(12, 16)
    return [
        *with_gradients(lambda y: F.cross_entropy(y, target, ignore_index=-100))(flat),
        *with_gradients(lambda y: F.mse_loss(y, torch.ones_like(y)))(flat),
    ]


def embedding(x: Tensor) -> list[Tensor]:
    tokens = torch.tensor([[1, 5, 1], [0, 2, 5]], device=x.device)
    return with_gradients(lambda w: F.embedding(tokens, w))(x.reshape(12, 16))


def dropout(x: Tensor) -> list[Tensor]:
    module = sim() if x.device.type == "sim" else torch
    module.manual_seed(3)
    drawn = [torch.randn(5, 4, device=x.device), torch.rand(7, device=x.device)]
    drawn += [torch.randint(0, 9, (8,), device=x.device), torch.randperm(6, device=x.device)]
    drawn += [torch.empty(40, device=x.device).normal_(0, 2), nn.init.trunc_normal_(x.clone())]
    return drawn + with_gradients(lambda y: F.dropout(y, 0.3) + F.dropout(y, 0.1))(x)


def codecs(x: Tensor) -> list[Tensor]:
    x = x.reshape(-1, 32).float()
    scale = x.abs().amax(1, keepdim=True) / 127
    q = (x / scale).round_().clamp_(-127, 127).to(torch.int8)
    low = (q & 15).to(torch.uint8)
    packed = low[:, ::2] | (low[:, 1::2] << 4)
    halves = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    out = torch.empty_like(x)
    torch.mul(q, scale, out=out)
    return [q, packed, halves, out, q.view(torch.uint8), q.to(torch.float32).mul_(scale), scale]


def indexing(x: Tensor) -> list[Any]:
    x = x.float().clone()
    values, order = x.sort(-1, descending=True)
    top, where = x.topk(3, dim=-1)
    picked = x[:, [0, 2]]
    x[:, 1] = 5
    x[x > 1] = 0
    scattered = torch.zeros_like(x).scatter_add_(1, order % 6, values)
    added = torch.zeros(6, 16, device=x.device).index_add_(0, order[0, 0, :2] % 6, x[0, :2])
    return [
        values,
        order,
        top,
        where,
        picked,
        x,
        scattered,
        added,
        x.nonzero(),
        x[x > 0],
        x.unique(),
        x.argmax(-1),
        x.flip(0),
        x.roll(2, 1),
        x.masked_fill(x > 0, 2),
        x.unfold(1, 2, 2),
        torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], device=x.device)),
        torch.nn.utils.rnn.pad_sequence([x[0], x[1, :3]]),
        F.one_hot(order[0, 0], 16),
        torch.isfinite(x).all(),
        x.std(),
        x.to(torch.float64).var(0),
    ]


def on_two_devices(x: Tensor) -> list[Tensor]:
    """Lists that are taken one by one, as on CUDA."""
    given = [x.clone(), torch.zeros(3, device="cpu"), torch.tensor(1.0, device="cpu")]
    torch._foreach_add_(given, 1)
    torch._foreach_mul_(given, [2.0, 3.0, 4.0])
    return [*given, *torch._foreach_abs(given)]


def train(optimizer: Callable[[Any], Any], device: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    model = model.to(device=device, dtype=dtype)
    chosen = optimizer(model.parameters())
    norms = []
    for step in range(4):
        loss = F.cross_entropy(
            model(numbers(step, 6, 8, dtype=dtype).to(device)).float(),
            torch.arange(6).to(device) % 4,
        )
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        chosen.step()
        chosen.zero_grad()
    return [*model.parameters(), *norms]


OPTIMIZERS = {
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, foreach=False),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
}


def cases() -> Iterator[tuple[str, Callable[[str], list[Any]]]]:
    for dtype in FLOATS:
        x, w, b = (numbers(k, *shape, dtype=dtype) for k, shape in enumerate(SHAPES))

        def gradients(function: Any, device: str, given: Any = (x, w, b)) -> list[Any]:
            return with_gradients(function)(*(t.to(device) for t in given))

        def value(function: Any, device: str, given: Tensor = x) -> list[Any]:
            return list(function(given.to(device)))

        for name, function in modules().items():
            yield f"{name} {dtype}", partial(gradients, function)
        for causal, mask in ((False, False), (True, False), (False, True)):
            attend = partial(attention, causal=causal, mask=mask)
            yield f"attention {causal} {mask} {dtype}", partial(value, attend)
        for case in (losses, embedding, dropout, codecs, indexing, on_two_devices):
            yield f"{case.__name__} {dtype}", partial(value, case)
        for name, optimizer in OPTIMIZERS.items():
            yield f"{name} {dtype}", partial(train, optimizer, dtype=dtype)


def different(rank: int, size: int) -> list[str]:
    """Names of the cases that differ, with the reason."""
    problems = []
    for name, case in cases():
        expected = case("cpu")
        try:
            got = [t.cpu() for t in case("sim")]
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            sim().synchronize()
            continue
        for i, (one, other) in enumerate(zip(expected, got, strict=True)):
            if one.dtype != other.dtype or not torch.equal(one, other):
                problems.append(f"{name}: value {i} differs, {one.dtype} {other.dtype}")
    return problems


@pytest.mark.parametrize("mode", ["threads", "random"])
def test_bitwise_the_cpus(mode: str) -> None:
    assert run(different, 1, mode=mode, jitter_us=0, timeout=200.0) == [[]]


def autocast(rank: int, size: int) -> None:
    x, w = (numbers(k, 8, 8).to("sim").requires_grad_() for k in range(2))
    with torch.autocast("sim", dtype=torch.bfloat16):
        y = F.linear(x, w)
        loss = F.cross_entropy(y, torch.arange(8, device="sim"))
    loss.backward()
    assert x.grad is not None
    assert (y.dtype, loss.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    expected = x.detach().cpu().bfloat16() @ w.detach().cpu().bfloat16().t()
    assert torch.equal(y.detach().cpu(), expected)


def test_autocast() -> None:
    run(autocast, 1, mode="lowest")
