"""Which qualified name belongs to which table, wherever scripts import it from."""

from __future__ import annotations

from dataclasses import dataclass

from polyshard_cli.migrate.terms import ddp, deepspeed, fsdp1, fsdp2
from polyshard_cli.migrate.terms.term import Guide, Table, Term

__all__ = ["CLIP", "GUIDES", "MODULES", "Known", "know", "leads_to_known"]

GUIDES: tuple[Guide, ...] = (fsdp2.GUIDE, fsdp1.GUIDE, ddp.GUIDE, deepspeed.GUIDE)
CLIP = "clip_grad_norm_"

_FSDP = "torch.distributed.fsdp"
_OLD = "torch.distributed._composable.fsdp"
_PARALLEL = "torch.nn.parallel"
_TABLES: dict[str, tuple[tuple[str, Table], ...]] = {
    _FSDP: (("fsdp2", fsdp2.NAMES), ("fsdp1", fsdp1.NAMES)),
    f"{_FSDP}.api": (("fsdp1", fsdp1.NAMES),),
    f"{_FSDP}.fully_sharded_data_parallel": (("fsdp1", fsdp1.NAMES),),
    f"{_FSDP}.wrap": (("fsdp1", fsdp1.POLICIES),),
    f"{_FSDP}._fully_shard": (("fsdp2", fsdp2.NAMES),),
    _OLD: (("fsdp2", fsdp2.NAMES),),
    f"{_OLD}.fully_shard": (("fsdp2", fsdp2.NAMES),),
    _PARALLEL: (("ddp", ddp.NAMES),),
    f"{_PARALLEL}.distributed": (("ddp", ddp.NAMES),),
    "deepspeed": (("deepspeed", deepspeed.NAMES),),
}
_CLIPS = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")
MODULES = tuple(_TABLES)
"""Modules whose names are in a table."""


@dataclass(frozen=True)
class Known:
    """A name of a table: of which ``family`` (fsdp2, fsdp1, ddp, deepspeed, clip), which term."""

    family: str
    term: Term

    @property
    def name(self) -> str:
        """As the table has it."""
        return self.term.theirs


def know(qualified: str) -> Known | None:
    """What is known of ``torch.distributed.fsdp.fully_shard`` and the like."""
    if qualified in _CLIPS:
        term = fsdp2.AROUND.find(_CLIPS[0])
        assert term is not None
        return Known("clip", term)
    for module, tables in _TABLES.items():
        if not qualified.startswith(f"{module}."):
            continue
        name = qualified[len(module) + 1 :]
        for family, table in tables:
            if term := table.find(name):
                return Known(family, term)
    return None


def leads_to_known(qualified: str) -> bool:
    """Whether ``qualified`` is a module with names of a table, those of other engines only."""
    return qualified in {*MODULES, f"{_FSDP}._fully_shard"} - {_PARALLEL}
