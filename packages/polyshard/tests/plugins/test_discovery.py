"""Installed plugins: found without being activated, and blamed by name when broken."""

from __future__ import annotations

import importlib.metadata
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
from toy_codecs import Codecs
from toy_entry_points import install
from toy_observers import Watching

from polyshard import CPUOffloadPolicy, OffloadPolicy
from polyshard.api import with_policy
from polyshard.errors import PluginError, UnsupportedError
from polyshard.plugins import discovery
from polyshard.plugins.discovery import installed_plugins, load_plugin
from polyshard.plugins.stack import build_stack


def make(site: Path, name: str, *entries: str, version: str = "1.0") -> None:
    """Put a distribution's metadata into ``site``, as an installer does."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata)
    lines = "\n".join(entries)
    (folder / "entry_points.txt").write_text(f"[{discovery.ENTRY_POINTS}]\n{lines}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_real_metadata_is_found_and_nothing_is_imported(site: Path) -> None:
    (site / "acme_loud.py").write_text("raise RuntimeError('imported')")
    make(site, "acme-loud", "loud = acme_loud", version="2.1")
    (found,) = [i for i in installed_plugins() if i.name == "loud"]
    assert found.distribution == "acme-loud 2.1"
    assert "acme_loud" not in sys.modules
    with pytest.raises(
        PluginError, match=r"'loud' of acme-loud 2\.1 \(acme_loud\) failed.*RuntimeError: imported"
    ) as caught:
        load_plugin("loud")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_two_distributions_with_one_name_are_both_listed(site: Path) -> None:
    make(site, "acme-one", "twice = toy_codecs:Codecs")
    make(site, "acme-two", "twice = toy_observers:Watching")
    with pytest.raises(
        PluginError, match=r"'twice' is provided by acme-one 1\.0 and acme-two 1\.0"
    ):
        load_plugin("twice")


def test_unknown_names_say_what_is_installed(site: Path) -> None:
    make(site, "acme", "sharpen = toy_codecs:Codecs")
    with pytest.raises(PluginError, match=r"named 'sharpem'\. Did you mean 'sharpen'\?.*Installed"):
        load_plugin("sharpem")


def make_codecs() -> Codecs:
    return Codecs()


@pytest.mark.parametrize("target", ["instance", "Made", "factory", "module"])
def test_an_entry_point_may_give_any_form(
    site: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    module = ModuleType("acme_forms")
    monkeypatch.setitem(sys.modules, "acme_forms", module)
    vars(module).update(instance=Codecs(), Made=Codecs, factory=make_codecs)
    make(site, "acme-forms", f"form = acme_forms{'' if target == 'module' else ':' + target}")
    expected = ModuleType if target == "module" else Codecs
    assert isinstance(load_plugin("form"), expected)


def test_a_factory_must_return_the_plugin(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("acme_forgetful")
    monkeypatch.setitem(sys.modules, "acme_forgetful", module)
    vars(module).update(factory=lambda: None)
    make(site, "acme-forgetful", "forgetful = acme_forgetful:factory")
    with pytest.raises(PluginError, match=r"'forgetful' of acme-forgetful 1\.0 .* is None"):
        load_plugin("forgetful")


def test_installed_is_not_active(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**kwargs: object) -> tuple[EntryPoint, ...]:
        raise AssertionError("scanned although no name was given")

    monkeypatch.setattr(importlib.metadata, "entry_points", refuse)
    assert build_stack([]).lines() == ()
    assert build_stack([Watching()]).lines() == ("watching 0",)


class Adapting(Codecs):
    """What stands for torch's offload policy."""

    pinned: bool | None = None

    def for_policy(self, policy: CPUOffloadPolicy) -> Adapting:
        self.pinned = policy.pin_memory
        return self


@pytest.fixture
def only_site(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site whose plugins are the only ones."""

    def here() -> list[discovery.Installed]:
        return [i for i in installed_plugins() if i.distribution.startswith("acme")]

    monkeypatch.setattr(discovery, "installed_plugins", here)
    return site


def test_the_policy_is_the_plugin_called_offload(only_site: Path) -> None:
    make(only_site, "acme-off", "offload = test_discovery_adapting:make")
    module = ModuleType("test_discovery_adapting")
    module.make = Adapting  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    other = Watching()
    first, second = with_policy([other], CPUOffloadPolicy(pin_memory=False))
    assert first is other
    assert isinstance(second, Adapting)
    assert second.pinned is False
    assert with_policy([other], OffloadPolicy()) == [other]


def test_something_else_called_offload_is_refused(only_site: Path) -> None:
    make(only_site, "acme-off", "offload = toy_codecs:Codecs")
    with pytest.raises(PluginError, match=r"'offload' has no for_policy\(\)"):
        with_policy([], CPUOffloadPolicy())


def test_without_the_plugin_the_policy_says_what_to_install(only_site: Path) -> None:
    with pytest.raises(UnsupportedError, match="pip install polyshard-offload"):
        with_policy([], CPUOffloadPolicy())


class Taking(Codecs):
    """What takes ``DTensor`` s, with another name than its entry point."""

    asked = 0

    def for_dtensors(self) -> Taking:
        Taking.asked += 1
        return self


def taking_dtensors() -> object | None:
    return discovery.stand_in("tensor_parallel", "for_dtensors", "take DTensors")


def test_dtensors_are_for_the_plugin_called_tensor_parallel(only_site: Path) -> None:
    assert taking_dtensors() is None
    make(only_site, "acme-tp", "tensor_parallel = test_discovery_taking:make")
    module = ModuleType("test_discovery_taking")
    module.make = Taking  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    assert isinstance(taking_dtensors(), Taking)
    assert Taking.asked == 1
    joined = build_stack([Watching()]).joined(taking_dtensors())
    assert sorted(joined.lines()) == ["codecs 1.2", "watching 0"]


def test_something_else_called_tensor_parallel_is_refused(only_site: Path) -> None:
    make(only_site, "acme-tp", "tensor_parallel = toy_codecs:Codecs")
    with pytest.raises(PluginError, match=r"'tensor_parallel' has no for_dtensors\(\)"):
        taking_dtensors()


def test_names_resolve_through_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("codecs", "toy_codecs:Codecs"), ("watching", "toy_observers:Watching"))
    assert build_stack(["codecs", Watching()]).lines() == ("codecs 1.2", "watching 0")
    with pytest.raises(
        PluginError, match=r"named 'codec'\. Did you mean 'codecs'\? Installed: codecs, w"
    ):
        build_stack(["codec"])


def test_the_order_of_entry_points_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [("codecs", "toy_codecs:Codecs"), ("watching", "toy_observers:Watching")]
    lines = set()
    for installed in (entries, entries[::-1]):
        install(monkeypatch, *installed)
        for names in (["codecs", "watching"], ["watching", "codecs"]):
            lines.add(build_stack(names).lines())
    assert len(lines) == 1


def test_broken_entry_points_name_their_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch,
        ("twice", "toy_codecs:Codecs"),
        ("twice", "toy_observers:Watching"),
        ("gone", "no_such_module:x"),
        ("needy", "toy_planning:Constrained"),
    )
    with pytest.raises(PluginError, match=r"'twice' is provided by .* and .*Uninstall one"):
        build_stack(["twice"])
    with pytest.raises(PluginError, match=r"'gone'.*no_such_module:x.*ModuleNotFoundError"):
        build_stack(["gone"])
    with pytest.raises(PluginError, match=r"'needy'.*without defaults, pass an object"):
        build_stack(["needy"])
