"""What cannot be followed is listed with its line, and stays."""

from __future__ import annotations

import pytest
from migrate_runs import migrated, unchanged


@pytest.mark.parametrize(
    ("source", "line", "words"),
    [
        ("from torch.distributed.fsdp import *\n", 1, "star import"),
        ("from deepspeed import *\n", 1, "star import"),
        ("import torch.distributed.fsdp as f\ng = getattr(f, name)\n", 2, "cannot be followed"),
        ("import torch.distributed.fsdp as f\nh = f\n", 2, "cannot be followed"),
        (
            "from torch.distributed.fsdp import fully_shard\nfully_shard = wrap(fully_shard)\n",
            1,
            "bound to something else",
        ),
        (
            "import torch.distributed.fsdp as f\nif x:\n    f = None\nf.fully_shard(m)\n",
            4,
            "bound to something else",
        ),
        (
            "import torch.distributed.fsdp as f\npolyshard = 3\nf.fully_shard(m)\n",
            3,
            "`polyshard` is bound",
        ),
        ("import importlib\nimportlib.import_module('torch.distributed.fsdp')\n", 2, "string"),
        ("mock.patch('torch.distributed.fsdp.fully_shard')\n", 1, "string"),
        ("from torch.distributed.fsdp._fully_shard import _fsdp_state\n", 1, "private"),
        ("from torch.distributed.fsdp import nothing_like_this\n", 1, "in no table"),
        ("import torch\ntorch.distributed.fsdp._flat_param.x\n", 2, "private"),
        (
            "from torch.distributed.fsdp import FullyShardedDataParallel as F\n"
            "def f(m: 'F'): ...\n",
            2,
            "an annotation that is a string",
        ),
        (
            "from torch.distributed.fsdp import StateDictType\nx = StateDictType.FULL_STATE_DICT\n",
            2,
            "full_state_dict=True",
        ),
        (
            "from torch.distributed.fsdp import BackwardPrefetch\nx = BackwardPrefetch\n",
            2,
            "is used here",
        ),
        (
            "from torch.distributed.fsdp.wrap import enable_wrap\nwith enable_wrap(): ...\n",
            2,
            "shard in a loop",
        ),
        ("from deepspeed.accelerator import get_accelerator\n", 1, "in no table"),
        ("import deepspeed\nx = deepspeed.init_inference(m)\n", 2, "an inference engine"),
        ("import deepspeed\nclass A(deepspeed.pipe.PipelineModule): ...\n", 2, "pipelining"),
    ],
)
def test_it_is_listed(source: str, line: int, words: str) -> None:
    found = unchanged(source)
    assert [at for at, _ in found.left] == [line]
    assert words in found.messages()


def test_relative_modules_are_somebody_elses() -> None:
    assert not unchanged("from .torch.distributed.fsdp import fully_shard, FSDP\n").findings


def test_local_names_are_somebody_elses() -> None:
    assert not unchanged("def fully_shard(m): ...\nfully_shard(fsdp)\n").findings


def test_what_is_certain_moves_beside_it() -> None:
    found = migrated("""
        from torch.distributed.fsdp import FSDPModule, fully_shard
        fully_shard = wrap(fully_shard)
    """)
    assert "from torch.distributed.fsdp import fully_shard\nfrom polyshard import FSDPModule\n" in (
        found.text
    )
    assert found.left == [(1, "fully_shard")]
