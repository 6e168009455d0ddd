"""Engines by name, and errors for names that mean nothing."""

from __future__ import annotations

import pytest

from polyshard_cli.compare import CompareError
from polyshard_cli.compare.engines.spec import KINDS, Spec, parse


def test_options_are_read() -> None:
    (spec,) = parse(["polyshard+int8+offload-optimizer+offload-fraction=0.5+flat+hsdp=2+bf16"], 4)
    assert spec == Spec(
        name="polyshard+int8+offload-optimizer+offload-fraction=0.5+flat+hsdp=2+bf16",
        kind="polyshard",
        bf16=True,
        replicas=2,
        flat=True,
        offload=(("optimizer", "host"), ("fraction", "0.5")),
        plugins=("int8",),
    )
    (other,) = parse(["polyshard+weights=int8+gradients=int4+offload-params=disk+keep"], 2)
    assert other.formats == ("int8", "int4")
    assert other.offload == (("params", "disk"),)
    assert other.keep


def test_every_kind_stands_alone() -> None:
    assert [spec.kind for spec in parse(list(KINDS), 1)] == list(KINDS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fsdp", "there is no 'fsdp'; did you mean fsdp2?"),
        ("deepspeed", "Known: polyshard, fsdp2, fsdp1, ddp, single"),
        ("", "there is no ''"),
        ("ddp+keep", "ddp has no option 'keep'; it takes none"),
        ("fsdp2+int8", "it takes bf16, keep, hsdp=N, offload-params"),
        ("fsdp2+offload-params=disk", "torch offloads to the host only"),
        ("polyshard+", "polyshard has no option ''"),
        ("polyshard+blocks=3", "formats and plugins"),
        ("polyshard+int8+int8", "names 'int8' twice"),
        ("polyshard+bf16=1", "bf16 takes no value"),
        ("polyshard+weights", "+weights=int8"),
        ("polyshard+offload-fraction", "+offload-fraction=0.5"),
        ("polyshard+hsdp=3", "of 4 ranks N may be 2"),
        ("polyshard+hsdp=4", "of 4 ranks N may be 2"),
        ("fsdp2+hsdp", "of 4 ranks N may be 2"),
    ],
)
def test_mistakes_are_told_with_what_works(name: str, expected: str) -> None:
    with pytest.raises(CompareError) as caught:
        parse([name], 4)
    assert expected in str(caught.value)


def test_replicas_need_ranks() -> None:
    with pytest.raises(CompareError, match="of 2 ranks none can be made: give --ranks 4"):
        parse(["polyshard+hsdp=2"], 2)


def test_an_engine_is_named_once() -> None:
    with pytest.raises(CompareError, match="names 'ddp' twice"):
        parse(["ddp", "single", "ddp"], 2)
