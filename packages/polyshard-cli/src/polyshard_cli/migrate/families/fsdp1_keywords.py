"""The keywords of ``FullyShardedDataParallel``, one function for each that means something."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from polyshard_cli.migrate.editing.finding import Finding, Kind
from polyshard_cli.migrate.families.wrapper import Shape, Wrapping, bind, call_with, is_word
from polyshard_cli.migrate.terms import fsdp1
from polyshard_cli.migrate.terms.catalog import know
from polyshard_cli.migrate.terms.term import Term, Verdict

__all__ = ["translate"]

_OFF = {
    "process_group": ("None",),
    "cpu_offload": ("None",),
    "auto_wrap_policy": ("None",),
    "mixed_precision": ("None",),
    "ignored_modules": ("None",),
    "param_init_fn": ("None",),
    "sync_module_states": ("False", "None"),
    "ignored_states": ("None",),
    "device_mesh": ("None",),
    "sharding_strategy": ("None",),
}
"""Values that ask for nothing."""

_HYBRID = {"HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"}
_BATCH_NORM = (
    "Batch norms are units of their own in 32 bits under FSDP1; here they compute as the rest."
)


def translate(wrapping: Wrapping) -> None:
    """Fill ``wrapping`` from the arguments of its call."""
    names = [term.theirs for term in fsdp1.KEYWORDS.terms]
    given = bind(wrapping.call, names)
    if given is None or "module" not in given:
        why = "its arguments are not all written out."
        wrapping.leave(wrapping.call, fsdp1.NAMES.terms[0], why)
        return
    for name, arg in given.items():
        term = fsdp1.KEYWORDS.find(name)
        assert term is not None
        if name == "module":
            wrapping.kept[arg] = ("", None)
        elif is_word(arg.value, *_OFF.get(name, ())):
            wrapping.consumed.add(arg)
        elif term.verdict is Verdict.DROPPED:
            wrapping.drop(arg, term)
        elif name in _TRANSLATORS:
            _TRANSLATORS[name](wrapping, arg, term)
        else:
            wrapping.leave(arg, term, f"`{name}=` is not the same thing there.")
    strategy = _strategy_of(wrapping, given.get("sharding_strategy"))
    member = fsdp1.STRATEGIES.find(strategy)
    if member is not None and strategy in _HYBRID and "mesh" not in wrapping.keywords():
        wrapping.leave(wrapping.call, member, f"`{strategy}` without `device_mesh=`.")
    if wrapping.classes and "mp_policy" in wrapping.keywords():
        _note(wrapping, wrapping.call, "MixedPrecision", _BATCH_NORM)


def _note(wrapping: Wrapping, node: cst.CSTNode, term: str, message: str) -> None:
    finding = Finding(wrapping.view.line(node), Kind.DIFFERS, term, message)
    if finding not in wrapping.findings:
        wrapping.findings.append(finding)


def _known(wrapping: Wrapping, node: cst.CSTNode) -> str:
    """The table's name of what ``node`` certainly is, else nothing."""
    names = wrapping.view.names(node)
    known = [know(name) for name, is_import in names.items() if is_import]
    return known[0].name if len(names) == 1 and known and known[0] else ""


def _strategy_of(wrapping: Wrapping, arg: cst.Arg | None) -> str:
    value = wrapping.view.value(arg.value) if arg else None
    if isinstance(value, cst.Attribute) and _known(wrapping, value.value) == "ShardingStrategy":
        return value.attr.value
    return ""


def _strategy(wrapping: Wrapping, arg: cst.Arg, term: Term) -> None:
    strategy = _strategy_of(wrapping, arg)
    member = fsdp1.STRATEGIES.find(strategy)
    if member is None:
        why = f"`{wrapping.view.code(arg.value)}`: which strategy this is cannot be seen."
        wrapping.leave(arg, term, why)
    elif member.verdict is Verdict.HAND:
        wrapping.leave(arg, member, f"`{strategy}` does not shard.")
    else:
        wrapping.consumed.add(arg)
        if strategy in {"SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"}:
            wrapping.added["reshard_after_forward"] = "False"


def _offload(wrapping: Wrapping, arg: cst.Arg, term: Term) -> None:
    value = wrapping.view.value(arg.value)
    fields = None
    if isinstance(value, cst.Call) and _known(wrapping, value.func) == "CPUOffload":
        fields = bind(value, ["offload_params"])
    if fields is None or any(not is_word(f.value, "True", "False") for f in fields.values()):
        wrapping.leave(arg, term, "whether this offloads cannot be seen.")
        return
    wrapping.consumed.add(arg)
    if any(is_word(f.value, "True") for f in fields.values()):
        wrapping.needed.add("CPUOffloadPolicy")
        wrapping.added["offload_policy"] = "CPUOffloadPolicy()"
        _note(wrapping, arg, "CPUOffload", "It selects a plugin: install polyshard-offload.")


def _precision(wrapping: Wrapping, arg: cst.Arg, term: Term) -> None:
    value = wrapping.view.value(arg.value)
    if not isinstance(value, cst.Call) or _known(wrapping, value.func) != "MixedPrecision":
        wrapping.leave(arg, term, "which precision this is cannot be seen.")
        return
    fields = bind(value, [each.theirs for each in fsdp1.PRECISION.terms])
    if fields is None:
        wrapping.leave(value, term, "its arguments are not all written out.")
        return
    kept = {}
    for at, (name, field) in enumerate(fields.items()):
        own = fsdp1.PRECISION.find(name)
        assert own is not None
        if is_word(field.value, _DEFAULTS.get(name, "")):
            wrapping.consumed.add(field)
        elif own.verdict is Verdict.REWRITTEN:
            kept[at] = (name, None)
        elif own.verdict is Verdict.DROPPED:
            wrapping.drop(field, own)
        else:
            wrapping.leave(field, own, f"`{name}` is not the same thing there.")
    own = fsdp1.PRECISION.find("cast_forward_inputs")
    if own is not None and (own.theirs, None) not in kept.values():
        _note(wrapping, value, own.theirs, own.differs)
    wrapping.edits[value] = call_with(Shape("MixedPrecisionPolicy", kept, {}))
    wrapping.consumed.add(value.func)
    wrapping.needed.add("MixedPrecisionPolicy")
    text = None
    if value is arg.value:  # written in place: its text is wanted as it will be
        inner = call_with(Shape("MixedPrecisionPolicy", kept, {}))(value)
        assert isinstance(inner, cst.Call)
        text = wrapping.view.code(inner)
    wrapping.kept[arg] = ("mp_policy", text)


_DEFAULTS = {
    "keep_low_precision_grads": "False",
    "cast_forward_inputs": "False",  # but of the root, for which it would leave them uncast here
    "cast_root_forward_inputs": "True",
}


def _mesh(wrapping: Wrapping, arg: cst.Arg, _: Term) -> None:
    wrapping.kept[arg] = ("mesh", None)


def _same_values(wrapping: Wrapping, arg: cst.Arg, term: Term) -> None:
    if not is_word(arg.value, "True"):
        wrapping.leave(arg, term, "whether it is true cannot be seen.")
        return
    wrapping.drop(arg, term)
    wrapping.needed.add("SameValues")
    wrapping.added["plugins"] = "[SameValues()]"


def _policy(wrapping: Wrapping, arg: cst.Arg, term: Term) -> None:
    """Classes or a function; where a variable holds the policy, it holds those afterwards."""
    value = wrapping.view.value(arg.value)
    found = _units(wrapping, value)
    if found is None:
        wrapping.leave(arg, term, "which modules it takes cannot be seen.")
        return
    kind, text = found
    if value is not arg.value:
        if not _is_used_by_wrapping_alone(wrapping, arg.value):
            name = wrapping.view.code(arg.value)
            wrapping.leave(arg, term, f"`{name}` is used for something else as well.")
            return
        plain = cst.parse_expression(text)
        wrapping.edits[value] = lambda _: plain
        wrapping.consumed.add(value)
        text = wrapping.view.code(arg.value)
    wrapping.consumed.add(arg)
    if kind == "classes":
        wrapping.classes = text
    else:
        wrapping.takes = text if text.replace(".", "").isidentifier() else f"({text})"


def _units(wrapping: Wrapping, value: cst.BaseExpression) -> tuple[str, str] | None:
    if not isinstance(value, cst.Call):
        return None
    if _known(wrapping, value.func) == "ModuleWrapPolicy":
        classes = bind(value, ["module_classes"])
        return ("classes", _tuple(wrapping, classes["module_classes"].value)) if classes else None
    if "functools.partial" not in wrapping.view.names(value.func) or not value.args:
        return None
    policy = _known(wrapping, value.args[0].value)
    rest = value.with_changes(args=value.args[1:])
    if policy == "transformer_auto_wrap_policy":
        given = bind(rest, ["transformer_layer_cls"])
        return (
            ("classes", _tuple(wrapping, given["transformer_layer_cls"].value)) if given else None
        )
    if policy == "lambda_auto_wrap_policy":
        given = bind(rest, ["lambda_fn"])
        return ("takes", wrapping.view.code(given["lambda_fn"].value)) if given else None
    return None


def _tuple(wrapping: Wrapping, value: cst.BaseExpression) -> str:
    """Classes as ``isinstance`` takes them."""
    if isinstance(value, cst.Set | cst.List | cst.Tuple):
        inner = [wrapping.view.code(each.value) for each in value.elements]
        if not any(isinstance(each, cst.StarredElement) for each in value.elements):
            return f"({inner[0]},)" if len(inner) == 1 else f"({', '.join(inner)})"
    return f"tuple({wrapping.view.code(value)})"


def _is_used_by_wrapping_alone(wrapping: Wrapping, name: cst.BaseExpression) -> bool:
    for mention in wrapping.view.mentions(name):
        arg = wrapping.view.parent(mention)
        call = wrapping.view.parent(arg) if isinstance(arg, cst.Arg) else None
        if not isinstance(call, cst.Call):
            return False
        if _known(wrapping, call.func) != "FullyShardedDataParallel":
            return False
    return True


_TRANSLATORS: dict[str, Callable[[Wrapping, cst.Arg, Term], None]] = {
    "sharding_strategy": _strategy,
    "cpu_offload": _offload,
    "auto_wrap_policy": _policy,
    "mixed_precision": _precision,
    "sync_module_states": _same_values,
    "device_mesh": _mesh,
}
