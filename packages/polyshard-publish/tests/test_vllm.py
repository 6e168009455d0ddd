"""vLLM itself, on the CPU: what it generates with published weights is what transformers does.

It needs an environment with the CPU wheel (``nox -s "engines(vllm)"``), and is skipped elsewhere.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyshard import fully_shard
from polyshard_publish import Publisher, SocketTarget
from polyshard_testing import World

vllm: Any = pytest.importorskip("vllm")
PROMPT = [3, 17, 42, 5, 99]
TOKENS = 12


def qwen(seed: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=64,
        tie_word_embeddings=bool(seed % 2),
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config)


def expected(model: Any) -> list[int]:
    found = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = found[0, len(PROMPT) :].tolist()
    return tokens


class Client:
    """What vLLM's trainers talk to, for an engine in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.collective_rpc("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._llm.collective_rpc("update_weights", kwargs={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.collective_rpc("finish_weight_update")


def publishes(rank: int, size: int, address: str, version: int) -> None:
    """A sharded trainer with weights of a seed."""
    model = qwen(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with Publisher(model, to=SocketTarget(address, token="t")) as publisher:
        publisher.publish(version)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_vllm_generates_what_transformers_does(
    world2: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from polyshard_publish.engines import vllm as ours

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setitem(os.environ, "VLLM_CPU_KVCACHE_SPACE", "1")
    ours.register()
    ours.register()
    first, second = qwen(0), qwen(4)
    first.save_pretrained(tmp_path)
    llm = vllm.LLM(
        str(tmp_path),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        weight_transfer_config=WeightTransferConfig(backend="polyshard"),
    )

    with socket.create_server(("127.0.0.1", 0)) as server:  # after vLLM has taken its own
        port = server.getsockname()[1]

    def generated() -> list[int]:
        settings = vllm.SamplingParams(
            temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False
        )
        found = llm.generate([{"prompt_token_ids": PROMPT}], settings, use_tqdm=False)
        llm.reset_prefix_cache()
        return list(found[0].outputs[0].token_ids)

    assert generated() == expected(first)
    publisher = Publisher(second, to=SocketTarget(f"127.0.0.1:{port}", token="t"), keep="values")
    trainer = WeightTransferTrainerFactory.trainer_init(
        ours.PolyshardTrainerInitInfo(publisher=publisher, port=port, token="t", rank=0),
        client=Client(llm),
    )
    for parameters in (None, second.model.layers[1].mlp):  # all weights, then a patch
        if parameters is not None:
            with torch.no_grad():
                nn.init.normal_(parameters.up_proj.weight, std=0.5)
        published = trainer.send_weights()
        assert bool(published.patched) == (parameters is not None)
        assert generated() == expected(second) != expected(first)
    source = ours.PublisherSource(publisher)
    metadata: Any = source.metadata  # 0.32 calls it, 0.33 reads it
    declared = metadata if isinstance(metadata, list) else metadata()
    said = [(one.name, one.dtype, one.shape) for one in declared]
    assert said == [(name, t.dtype, tuple(t.shape)) for name, t in source.iter_full()]

    world2.run(publishes, f"127.0.0.1:{port}", 3)  # two ranks, and rank 0's words by hand
    client = Client(llm)
    client.start_weight_update()
    client.update_weights({"version": 3})
    client.finish_weight_update()
    third = qwen(2)
    with torch.no_grad():
        for parameter in third.parameters():
            parameter.mul_(-0.7)
    assert generated() == expected(third)
