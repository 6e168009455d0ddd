"""The largest of the open models, on 4096 ranks, from its published shape."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Table 3 of "The Llama 3 Herd of Models" (arXiv 2407.21783), and its vocabulary.
FIELDS = {
    "hidden_size": 16384,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 53248,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
PROGRAM = """
import json, resource, sys, time
begin = time.perf_counter()
from polyshard_cli.plan import Settings, draft, parse_mesh
mesh, fields = parse_mesh("dp=512,tp=8"), json.loads(sys.argv[1])
settings = Settings(model="LlamaConfig", mesh=mesh, overrides=fields, bf16=True)
document = json.loads(draft(settings).to_json())
document["seconds"] = time.perf_counter() - begin
document["kibibytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("\\n" + json.dumps(document))
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_405b_is_planned_in_two_gibibytes() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("polyshard_tensor_parallel")
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(FIELDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{found['seconds']:.1f} s, {found['kibibytes'] / 1024:.0f} MiB")
    assert found["kibibytes"] <= 2 << 20
    # Attention, feed-forward, norms; embedding and head; the last norm.
    block = 2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248 + 2 * 16384
    assert found["model"]["parameters"] == 126 * block + 2 * 128256 * 16384 + 16384
    (layers,) = (g for g in found["groups"] if g["name"] == "model.layers.*")
    assert layers["count"] == 126
    # Rank 0: 4 rows of queries, one of keys and of values (128 rows for 512 ranks), 32 of outputs;
    # 13 of gate and up, 32 of down; 32 of each norm.
    wide = 16384 * (4 + 2 + 2 * 13)
    narrow = 32 * (16384 // 8 + 53248 // 8)
    assert layers["shard_bytes"] - layers["padding_bytes"] == 4 * (wide + narrow + 2 * 32)
    assert found["timing"]["step_seconds"] > 0
    assert not [n for n in found["notices"] if n["code"] == "no-activations"]
