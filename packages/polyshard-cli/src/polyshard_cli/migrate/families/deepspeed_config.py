"""What a configuration asks of ``fully_shard`` and of the loop, and what it leaves to the hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import libcst as cst

from polyshard_cli.migrate.editing.draft import Draft
from polyshard_cli.migrate.editing.finding import Finding, Kind
from polyshard_cli.migrate.source.config import Configuration, Setting
from polyshard_cli.migrate.terms.deepspeed import KEYS
from polyshard_cli.migrate.terms.term import Term, Verdict

__all__ = ["Wish", "wish_of"]

_DTYPES = {
    "fp16": "torch.float16",
    "fp32": "torch.float32",
    "bf16": "torch.bfloat16",
    "bfp16": "torch.bfloat16",
}


_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")
_ACCUMULATION = "gradient_accumulation_steps"
# https://github.com/deepspeedai/DeepSpeed/pull/8068
_NO_CLIPPING = (
    "Newer DeepSpeed (0.19.8 does) clips to a norm of 1 where no `gradient_clipping` is given; "
    "here nothing is clipped. Write the value that is meant, or 0."
)


@dataclass
class Wish:
    """Keywords of ``fully_shard`` as text, the norm to clip by, and whether anything is left."""

    keywords: dict[str, str] = field(default_factory=dict)
    precision: dict[str, str] = field(default_factory=dict)
    clipping: str = ""
    is_left: bool = False

    def arguments(self) -> list[str]:
        """Keywords of ``fully_shard``, written out."""
        given = dict(self.keywords)
        if self.precision:
            inner = ", ".join(f"{name}={value}" for name, value in self.precision.items())
            given["mp_policy"] = f"MixedPrecisionPolicy({inner})"
        return [f"{name}={value}" for name, value in given.items()]


def wish_of(draft: Draft, node: cst.CSTNode, configuration: Configuration) -> Wish:
    """Read every key, and say at ``node`` what becomes of it."""
    wish = Wish(keywords={"plugins": "[SameValues()]"})
    keys = set()
    for setting in configuration.settings():
        keys.add(setting.key)
        _take(draft, node, setting, wish)
    if "zero_optimization.stage" not in keys:
        why = f"{configuration.name}: no `zero_optimization.stage`, so nothing is sharded."
        instead = "keep DDP, or choose what to shard with `fully_shard`"
        draft.say(node, Kind.HAND, "zero_optimization.stage", why, instead)
        wish.is_left = True
    if "gradient_clipping" not in keys:
        draft.say(node, Kind.DIFFERS, "gradient_clipping", _NO_CLIPPING)
    _accumulation(draft, node, configuration, wish)
    return wish


def _accumulation(
    draft: Draft, node: cst.CSTNode, configuration: Configuration, wish: Wish
) -> None:
    """Of two sizes of batches DeepSpeed works out how many micro-batches a step has."""
    sizes = [configuration.values.get(key) for key in _SIZES]
    if all(isinstance(size, int) for size in sizes) and not configuration.values.get(_ACCUMULATION):
        term = KEYS.find(_ACCUMULATION)
        assert term is not None
        why = f"{configuration.name}: a step has {sizes[0]} / ({sizes[1]} * ranks) micro-batches."
        instead = f'write `"{_ACCUMULATION}": 1` if that is 1; else {term.ours}'
        draft.say(node, Kind.HAND, _ACCUMULATION, why, instead)
        wish.is_left = True


def _take(draft: Draft, node: cst.CSTNode, setting: Setting, wish: Wish) -> None:
    term, said = setting.term, f"{setting.place}`{setting.key}`"
    if term is None:
        _say(
            draft,
            node,
            setting,
            Kind.HAND,
            f"{said} is unknown.",
            "look up what it does",
        )
        wish.is_left = True
    elif setting.is_off and not _is_stage(setting):
        return
    elif setting.is_auto and term.verdict is not Verdict.DROPPED:
        why = f'{said} is "auto", which transformers fills in.'
        _say(draft, node, setting, Kind.HAND, why, "write the value")
        wish.is_left = True
    elif term.verdict is Verdict.REWRITTEN and _WISHES[setting.key](setting, wish):
        _say_done(draft, node, setting, term)
    elif term.verdict is Verdict.DROPPED:
        message = f"{said} is left out. {term.differs}".strip()
        _say(draft, node, setting, Kind.DIFFERS, message)
    else:
        kind = Kind.REFUSED if term.verdict is Verdict.REFUSED else Kind.HAND
        _say(draft, node, setting, kind, f"{said} is {_short(setting.value)}.", term.ours)
        wish.is_left = True


def _is_stage(setting: Setting) -> bool:
    return setting.key == "zero_optimization.stage"


def _say_done(draft: Draft, node: cst.CSTNode, setting: Setting, term: Term) -> None:
    said = f"{setting.place}`{setting.key}` is {_short(setting.value)}: {term.ours}."
    _say(draft, node, setting, Kind.DIFFERS, f"{said} {term.differs}".strip())


def _say(
    draft: Draft, node: cst.CSTNode, setting: Setting, kind: Kind, message: str, instead: str = ""
) -> None:
    """At the line of the key, if that is in the script, else at ``node``."""
    line = setting.line or draft.view.line(node)
    draft.findings.append(Finding(line, kind, setting.key, message, instead))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _stage(setting: Setting, wish: Wish) -> bool:
    if setting.value in (1, 2):
        wish.keywords.setdefault("reshard_after_forward", "False")
    return setting.value in (1, 2, 3) and not isinstance(setting.value, bool)


def _secondary(setting: Setting, wish: Wish) -> bool:
    """hpZ: parameters are gathered again from a smaller group of ranks."""
    is_size = isinstance(setting.value, int) and setting.value > 1
    if is_size:
        wish.keywords["reshard_after_forward"] = str(setting.value)
    return is_size


def _clipping(setting: Setting, wish: Wish) -> bool:
    is_norm = isinstance(setting.value, int | float) and setting.value > 0
    if is_norm:
        wish.clipping = repr(setting.value)
    return is_norm


def _bf16(setting: Setting, wish: Wish) -> bool:
    value = setting.value
    known = value is True or (isinstance(value, Mapping) and set(value) <= {"enabled"})
    if known:
        wish.precision["param_dtype"] = "torch.bfloat16"
    return known


def _communication(setting: Setting, wish: Wish) -> bool:
    dtype = _DTYPES.get(str(setting.value))
    if dtype:
        wish.precision["reduce_dtype"] = dtype
    return dtype is not None


_WISHES: dict[str, Callable[[Setting, Wish], bool]] = {
    "zero_optimization.stage": _stage,
    "zero_optimization.zero_hpz_partition_size": _secondary,
    "gradient_clipping": _clipping,
    "bf16": _bf16,
    "communication_data_type": _communication,
}
