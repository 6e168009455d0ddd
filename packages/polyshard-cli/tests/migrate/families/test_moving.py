"""FSDP2: imports move, with their comments; uses through modules lose the prefix."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from migrate_runs import migrated, unchanged

from polyshard_cli.migrate.families.deepspeed import Beside
from polyshard_cli.migrate.migration import migrate_files, migrate_source, write_files


def test_a_whole_import_keeps_its_layout() -> None:
    found = migrated("""
        from torch.distributed.fsdp import (
            fully_shard,  # shards
            MixedPrecisionPolicy as MP,
        )  # both

        fully_shard(model, mp_policy=MP())
    """)
    assert found.text.startswith(
        "from polyshard import (\n"
        "    fully_shard,  # shards\n"
        "    MixedPrecisionPolicy as MP,\n"
        ")  # both\n"
    )
    assert not found.left


def test_what_stays_with_torch_is_split_off() -> None:
    found = migrated("""
        # sharding
        from torch.distributed.fsdp import (
            fully_shard,  # shards
            StateDictType,  # of FSDP1
        )
        fully_shard(model)
    """)
    assert found.text == (
        "# sharding\n"
        "from torch.distributed.fsdp import (\n"
        "    StateDictType,  # of FSDP1\n"
        ")\n"
        "from polyshard import (\n"
        "    fully_shard,  # shards\n"
        ")\n"
        "fully_shard(model)\n"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "import torch.distributed.fsdp as fsdp\nfsdp.fully_shard(model)\n",
            "import polyshard\npolyshard.fully_shard(model)\n",
        ),
        (
            "from torch.distributed import fsdp\nfsdp.fully_shard(model)\n",
            "import polyshard\npolyshard.fully_shard(model)\n",
        ),
        (
            "import torch\ntorch.distributed.fsdp.fully_shard(model)\n",
            "import torch\nimport polyshard\npolyshard.fully_shard(model)\n",
        ),
        (
            "import torch.distributed.fsdp\ntorch.distributed.fsdp.fully_shard(model)\n",
            "import torch.distributed.fsdp\nimport polyshard\npolyshard.fully_shard(model)\n",
        ),
        (
            "import torch.distributed as dist\ndist.fsdp.fully_shard(model)\n",
            "import torch.distributed as dist\nimport polyshard\npolyshard.fully_shard(model)\n",
        ),
        (
            "from torch.distributed._composable.fsdp import fully_shard\nfully_shard(model)\n",
            "from polyshard import fully_shard\nfully_shard(model)\n",
        ),
        (
            "import os; from torch.distributed.fsdp import fully_shard; fully_shard(model)\n",
            "import os; from polyshard import fully_shard; fully_shard(model)\n",
        ),
        (
            "if fast: from torch.distributed.fsdp import fully_shard, StateDictType\n",
            "if fast: from torch.distributed.fsdp import StateDictType; "
            "from polyshard import fully_shard\n",
        ),
        (
            "def shard(model):\n    import torch.distributed.fsdp as f\n    f.fully_shard(model)\n",
            "def shard(model):\n    import polyshard\n    polyshard.fully_shard(model)\n",
        ),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
            "    from torch.distributed.fsdp import FSDPModule\n\ndef f(m: 'FSDPModule'): ...\n",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
            "    from polyshard import FSDPModule\n\ndef f(m: 'FSDPModule'): ...\n",
        ),
        (
            "try:\n    from torch.distributed.fsdp import fully_shard\nexcept ImportError:\n"
            "    from torch.distributed._composable.fsdp import fully_shard\n",
            "try:\n    from polyshard import fully_shard\nexcept ImportError:\n"
            "    from polyshard import fully_shard\n",
        ),
    ],
)
def test_forms(source: str, expected: str) -> None:
    found = migrated(source)
    assert found.text == expected
    assert not found.left


def test_a_module_that_is_used_for_more_stays_imported() -> None:
    found = migrated("""
        import torch.distributed.fsdp as fsdp
        fsdp.fully_shard(model)
        fsdp.StateDictType.FULL_STATE_DICT
    """)
    assert found.text.startswith("import torch.distributed.fsdp as fsdp\nimport polyshard\n")
    assert found.left == [(3, "StateDictType")]


def test_clipping_moves_where_something_is_sharded() -> None:
    found = migrated("""
        import torch
        from torch.distributed.fsdp import fully_shard
        from torch.nn.utils import clip_grad_norm_ as clip, parameters_to_vector
        fully_shard(model)
        clip(model.parameters(), 1.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    """)
    assert "from torch.nn.utils import parameters_to_vector\n" in found.text
    assert "from polyshard import clip_grad_norm_ as clip\n" in found.text
    assert "\npolyshard.clip_grad_norm_(model.parameters(), 1.0)\n" in found.text
    assert not found.left


def test_clipping_alone_stays() -> None:
    unchanged("""
        from torch.nn.utils import clip_grad_norm_  # with fsdp elsewhere
        clip_grad_norm_(model.parameters(), 1.0)
    """)


def test_the_norm_is_not_a_dtensor_any_more() -> None:
    found = migrated("""
        from torch.nn.utils import clip_grad_norm_
        from torch.distributed.fsdp import fully_shard
        fully_shard(model)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        print(norm.full_tensor())
    """)
    assert found.left == [(5, "torch.nn.utils.clip_grad_norm_")]


def test_encoding_and_line_ends_are_kept() -> None:
    text = "# -*- coding: latin-1 -*-\r\n# é\r\nfrom torch.distributed.fsdp import fully_shard\r\n"
    file = migrate_source(Path("a.py"), text.encode("latin-1"), Beside(Path()))
    assert file.after == text.replace("torch.distributed.fsdp", "polyshard").encode("latin-1")
    assert "+from polyshard import fully_shard\r\n" in file.diff


def test_form_feeds_end_no_line(tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    text = (
        "# one\n\x0c\n"
        "from torch.nn.utils import clip_grad_norm_\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "fully_shard(model)\n"
        "norm = clip_grad_norm_(model.parameters(), 1.0)\n"
        "norm.full_tensor()\n"
    )
    script.write_bytes(text.encode())
    document = migrate_files([script])
    (file,) = document.files
    assert "No newline" not in file.diff
    patched = subprocess.run(
        ["git", "apply", "-p0", "-"],
        cwd=tmp_path,
        input=file.diff.replace(f"a{script}", "a.py").replace(f"b{script}", "a.py").encode(),
        capture_output=True,
        check=False,
    )
    assert (patched.returncode, script.read_bytes()) == (0, file.after), patched.stderr
    (before,) = (finding.line for finding in file.findings if finding.kind.is_left)
    script.write_bytes(text.encode())
    (written,) = write_files(document).files
    (after,) = (finding.line for finding in written.findings if finding.kind.is_left)
    assert file.before.split(b"\n")[before - 1] == written.after.split(b"\n")[after - 1]
