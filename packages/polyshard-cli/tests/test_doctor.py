"""``polyshard doctor``: each thing that can be wrong with a machine, and its remedy."""

from __future__ import annotations

import os
import resource
import socket
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_entry_points import install
from typer.testing import CliRunner

from polyshard_cli import checks, self_test
from polyshard_cli.checks import Finding, State
from polyshard_cli.main import app


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app(), ["doctor", *arguments])
    return result.exit_code, result.output


def test_a_healthy_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, ("codecs", "toy_codecs:Codecs"))
    patient = partial(self_test.self_test, 2 * self_test.SECONDS)  # the machine may be very busy
    monkeypatch.setattr(self_test, "self_test", patient)
    code, text = run("--disk", str(tmp_path))
    assert code == 0, text
    lines = text.splitlines()
    assert lines[0].startswith(f"✔ torch: torch {torch.__version__}")
    assert any(line.startswith("✔ two ranks: trained a step") for line in lines)
    assert any(line.startswith("✔ plugin codecs") for line in lines)
    assert f"in {tmp_path}" in text


def test_problems_end_with_1_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("gone", "no_such_module:x"))
    code, text = run("--quick", "--disk", "/no/such/place")
    assert code == 1
    assert "✘ disk: /no/such/place cannot be written to: " in text
    assert "✘ plugin gone" in text
    assert text.splitlines()[-1].startswith("2 to fix: disk, plugin gone")
    assert "two ranks" not in text


def only(found: Any) -> Finding:
    (finding,) = found
    assert isinstance(finding, Finding)
    return finding


@pytest.mark.parametrize(
    ("version", "state", "said"),
    [
        ("2.10.1", State.PROBLEM, "too old, 2.11 to 2.15 are tested"),
        ("2.11.0+cu130", State.FINE, "torch 2.11.0+cu130, Python 3."),
        ("2.16.0", State.WARNING, "newer than 2.11 to 2.15"),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, state: State, said: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    finding = only(checks.torch_build())
    assert finding.state is state
    assert said in finding.text


def test_a_build_without_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert only(checks.backends()).state is State.PROBLEM


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert only(checks.interfaces()).state is State.FINE
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    finding = only(checks.interfaces())
    assert finding.state is State.PROBLEM
    assert "there is no interface nosuch0, only " in finding.text


@pytest.mark.parametrize(
    ("variable", "value", "state"),
    [
        ("GLOO_SOCKET_IFNAME", "l", State.PROBLEM),
        ("NCCL_SOCKET_IFNAME", "l", State.FINE),
        ("NCCL_SOCKET_IFNAME", "=l", State.PROBLEM),
        ("NCCL_SOCKET_IFNAME", "=lo", State.FINE),
        ("NCCL_SOCKET_IFNAME", "^docker", State.FINE),
    ],
)
def test_only_nccl_takes_the_beginning_of_a_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, state: State
) -> None:
    for name in checks.INTERFACES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    monkeypatch.setenv(variable, value)
    assert only(checks.interfaces()).state is state


Address = namedtuple("Address", "family type proto name address")


def resolved(monkeypatch: pytest.MonkeyPatch, address: str) -> Finding:
    for name in checks.INTERFACES:
        monkeypatch.delenv(name, raising=False)
    found = [Address(socket.AF_INET, 0, 0, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a: found)
    return only(checks.interfaces())


def test_a_name_that_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = resolved(monkeypatch, "203.0.113.7")  # an address for documentation, of no host
    assert finding.state is State.PROBLEM
    assert "203.0.113.7 are not this machine's" in finding.text
    assert finding.text.startswith("set GLOO_SOCKET_IFNAME")
    assert resolved(monkeypatch, "127.0.0.1").state is State.WARNING


def test_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise OSError("Name or service not known")

    for name in checks.INTERFACES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    finding = only(checks.interfaces())
    assert finding.state is State.PROBLEM
    assert "has no address: Name or service not known" in finding.text


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    finding = only(checks.limits())
    assert finding.state is State.PROBLEM
    assert "256 open files; run 'ulimit -n 4096'" in finding.text


def test_little_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Room = namedtuple("Room", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda path: Room(1000, 4096))
    shared = only(checks.shared_memory(tmp_path))
    assert shared.state is State.PROBLEM
    assert "4 MiB free" in shared.text
    assert only(checks.disk(tmp_path)).state is State.WARNING
    assert only(checks.shared_memory(tmp_path / "none")).state is State.WARNING


def test_ranks_that_do_not_answer() -> None:
    finding = only(self_test.self_test(seconds=0.0))
    assert finding.state is State.PROBLEM
    assert "ranks [0, 1] did not answer within 0 s" in finding.text


def test_ranks_that_fail_or_err(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[int, tuple[str, list[float]]] = {0: ("", []), 1: ("OSError: no loopback", [])}
    monkeypatch.setattr(self_test, "_answers", lambda seconds: answers)
    assert only(self_test.self_test()).text == "rank 1: OSError: no loopback"
    answers[1] = ("", [1.0])
    assert "weights after a step differ" in only(self_test.self_test()).text
