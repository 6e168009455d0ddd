"""The page about transports is what the classes say, and names everything that is public."""

from __future__ import annotations

import inspect

from make_transport_docs import PAGE, page
from polyshard import transport
from polyshard.composition.roles import ROLES


def test_the_page_is_current() -> None:
    assert PAGE.read_text("utf-8") == page()


def test_every_public_class_has_a_section() -> None:
    text = page()
    for name in transport.__all__:
        kind = getattr(transport, name)
        assert (f"\n## {name}\n" if inspect.isclass(kind) else f"`{name}(") in text, name


def test_every_member_of_a_transport_is_shown_with_its_text() -> None:
    text = page()
    for name in inspect.get_annotations(transport.Transport):
        assert f"- `{name}: " in text
    for kind in (transport.Transport, transport.GatherRoute, transport.ReduceRoute):
        for name, member in vars(kind).items():
            if inspect.isfunction(member):
                assert f"- `{name}(" in text
    assert "as the base says" not in text.partition("## WrappedTransport")[0]


def test_every_default_is_listed() -> None:
    for role in ROLES:
        assert f"| {role.name} | `{type(role.engine()).__name__}` |" in page()
