"""Medians, ratios and differences, by hand."""

from __future__ import annotations

import json
import math

from compare_found import MIB, found, run, settings

from polyshard_cli.compare.ranks.messages import Failure
from polyshard_cli.compare.report.runs import Run
from polyshard_cli.compare.report.summary import summarize


def test_times_are_medians_of_the_slowest_rank_without_warmup() -> None:
    plain, other, single, _ = (result.timing for result in found().results)
    assert plain is not None
    assert other is not None
    assert single is not None
    assert plain.step_seconds == (0.2, 0.1, 0.3)
    assert (plain.median_seconds, plain.ratio, plain.paired_ratio) == (0.2, 1.0, 1.0)
    assert other.ratio == 0.5
    assert other.paired_ratio == 0.5  # of 1/2, 1, 1/3
    assert single.ratio == 2.0
    assert single.paired_ratio == 2.0  # of 2, 5, 1


def test_bytes_are_medians_by_rank_and_peaks_are_the_largest() -> None:
    plain, _, single, _ = found().results
    assert plain.wire_bytes == (102, 300)
    assert plain.counted_bytes == (90, 90)
    assert single.counted_bytes is None
    assert plain.sent_bytes == 300
    assert plain.peak_bytes == 5 * MIB


def test_losses_are_means_and_differences_those_of_means() -> None:
    plain, other, single, _ = (result.losses for result in found().results)
    assert plain is not None
    assert other is not None
    assert single is not None
    assert plain.steps == (6.0, 5.0, 4.0, 3.0)
    assert (other.largest_difference, other.bitwise) == (0.25, False)
    assert (single.largest_difference, single.bitwise) == (0.0, True)


def test_one_process_has_the_same_batches_in_other_ranks() -> None:
    spread = run("polyshard", [1.0] * 4, [1.0] * 4)
    alone = run("single", [1.0] * 4, [1.0] * 4)
    alone.steps = [
        [type(step[0])((*step[0].losses, *step[1].losses), 1.0, 0, 0)] for step in alone.steps
    ]
    _, single = summarize(settings(), [spread, alone]).results
    assert single.losses is not None
    assert single.losses.bitwise


def test_losses_that_are_no_numbers_are_null() -> None:
    runs = [
        run("a", [1.0] * 4, [1.0, math.nan, 1.0, math.inf]),
        run("b", [1.0] * 4, [1.0, math.nan, 1.0, 2.0]),
        run("c", [1.0] * 4, [1.0, math.nan, 1.0, math.inf]),
    ]
    comparison = summarize(settings(), runs)
    _, differs, same = (result.losses for result in comparison.results)
    assert differs is not None
    assert same is not None
    assert (differs.largest_difference, differs.bitwise) == (math.inf, False)
    assert same.bitwise
    losses = json.loads(comparison.to_json())["results"][1]["losses"]
    assert losses["steps"] == [2.0, None, 2.0, 3.0]
    assert losses["largest_difference"] is None


def test_engines_that_failed_have_an_error_alone() -> None:
    comparison = found()
    assert comparison.failed
    failed = comparison.results[-1]
    assert failed.error is not None
    assert (failed.error.rank, failed.error.step, failed.error.details) == (1, None, "where")
    assert failed.timing is None
    everything = summarize(settings(), [Run("a", failure=Failure(0, "no"))])
    assert everything.reference is None
    assert everything.job is None


def test_without_turns_there_are_no_pairs() -> None:
    (first, *_) = found(sequential=True).results
    assert first.timing is not None
    assert first.timing.paired_ratio is None
