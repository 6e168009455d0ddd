"""Which failure is the cause."""

from __future__ import annotations

from polyshard.errors import PeerError
from polyshard_cli.compare import JobError
from polyshard_cli.compare.ranks.messages import LONGEST, Failure, first_of, one_line


def test_echoes_of_other_ranks_are_not_the_cause() -> None:
    echoes = [
        Failure.of(0, PeerError("rank 1 failed")),
        Failure.of(2, RuntimeError("Connection closed by peer [127.0.0.1]:4")),
    ]
    cause = Failure.of(1, ZeroDivisionError("by hand"))
    assert first_of([*echoes, cause]) is cause
    assert first_of(echoes) is echoes[0]
    assert cause.message == "ZeroDivisionError: by hand"


def test_a_job_speaks_for_itself() -> None:
    failure = Failure.of(0, JobError("JOB x: no"))
    assert (failure.is_of_job, failure.message) == (True, "JOB x: no")


def test_long_messages_are_one_line() -> None:
    assert one_line("a\n  b\tc") == "a b c"
    assert len(one_line("x" * 1000)) == LONGEST
