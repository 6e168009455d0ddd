"""Scripts, and errors for files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyshard_cli.compare import Job, JobError, Settings
from polyshard_cli.compare.job.loading import built, digest_of, load

SCRIPT = """
import torch
from beside_job import WIDTH

def build():
    model = torch.nn.Linear(WIDTH, 1)
    return model, lambda step, rank, ranks: torch.ones(2, WIDTH), lambda m, x: m(x).mean()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside_job.py").write_text("WIDTH = 3\n")
    path = tmp_path / "my-job.py"
    path.write_text(SCRIPT)
    return path


def job_of(name: str) -> Job:
    settings = Settings(job=name)
    return built(settings, load(settings))


def refused(name: str) -> str:
    with pytest.raises(JobError) as caught:
        load(Settings(job=name))
    return str(caught.value)


def test_a_file_finds_what_lies_beside_it(script: Path) -> None:
    job = job_of(str(script))
    assert [tuple(p.shape) for p in job.model.parameters()] == [(1, 3), (1,)]
    assert float(job.loss(job.model, job.batch(0, 0, 1)).detach()) == pytest.approx(
        sum(float(p.detach().sum()) for p in job.model.parameters()), rel=1e-5
    )
    assert isinstance(job.optimizer(job.model), torch.optim.AdamW)


def test_values_follow_from_the_seed(script: Path) -> None:
    def digest(seed: int) -> object:
        settings = Settings(job=str(script), seed=seed)
        return digest_of(built(settings, load(settings)).model)

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)


def test_the_demonstration() -> None:
    settings = Settings(job="demo:tiny", batch=3, sequence=16)
    job = built(settings, load(settings))
    inputs, targets = job.batch(0, 1, 2)
    assert inputs.shape == targets.shape == (3, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    loss = job.loss(job.model, (inputs, targets))
    assert float(loss.detach()) == pytest.approx(5.5, abs=0.3)  # log(256) before training


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nowhere.py", "there is no such file"),
        ("demonstration", "a file ends in .py"),
        ("demo:tyni", "did you mean demo:tiny?"),
        ("nowhere:build", "importing nowhere failed"),
        ("compare_jobs:twoer", "did you mean compare_jobs:tower?"),
        ("compare_jobs:WIDTH", "is a int, not a function"),
    ],
)
def test_names_that_mean_nothing(name: str, expected: str) -> None:
    assert expected in refused(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def make(): ...", "has no build(); build() returns (model, batch, loss)"),
        ("def make(): ...", "It has make"),
        ("build = 3", "build is a int, not a function"),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def build(:", "importing it failed: SyntaxError"),
        ("raise SystemExit(4)", "importing it left the program (4)"),
    ],
)
def test_scripts_that_are_no_jobs(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(text)
    assert expected in refused(str(path))
