"""The page in the end: ``report.html``, what happened beside what was predicted.

It is made from ``report.json``.
"""

import json
from collections.abc import Mapping
from typing import Any

from polyshard.files import replace_file
from polyshard_demo.prediction import predicted, unplanned
from polyshard_demo.settings import Settings

__all__ = ["write_page"]

PAGE = "report.html"

ON_CPU = (
    "Measured memory is the process's peak, less its memory before the first step without its "
    "part of the model. It includes allocations of libraries in the meantime."
)
ON_DEVICE = "Measured memory is the peak of torch's allocator on the device."


def write_page(settings: Settings) -> str:
    """Make the page of the run in ``settings.out``; what to say of it.

    This process must have no process group. A run that has ended well is not failed by its page:
    whatever cannot be predicted stands on it as a sentence, and whatever else fails is said.
    """
    path = settings.out / PAGE
    try:
        found = json.loads((settings.out / "report.json").read_text("utf-8"))
        replace_file(path, _page(settings, found).encode())
    except Exception as error:  # whatever it is, the run's results are written
        return f"without {PAGE}: {type(error).__name__}: {error}"
    return f"the run beside its prediction: {path}"


def _page(settings: Settings, found: Mapping[str, Any]) -> str:
    from polyshard_cli.plan.report.outcome import Outcome, RankFacts, run_page

    is_cpu = found["ranks"][0]["device_bytes"] is None
    why = unplanned(settings)
    plans: Mapping[int, Any] = {}
    if not why:
        try:
            plans = predicted(settings, is_cpu=is_cpu)
        except Exception as error:  # what happened is worth a page all the same
            why = f"the plan could not be made ({type(error).__name__}: {error})"
    notes = [ON_CPU if is_cpu else ON_DEVICE]
    if why:
        notes.append(f"Nothing is predicted: {why}.")
    elif not settings.machine:
        notes.append(
            "Time is not predicted: no machine was named. polyshard plan --measure FILE.json "
            "measures this one; polyshard train --machine FILE.json then predicts for it."
        )
    held = (
        rank["resident_bytes"] - rank["before_bytes"] if is_cpu else rank["device_bytes"]
        for rank in found["ranks"]
    )
    sent = (rank["step_sent_bytes"] for rank in found["ranks"])
    steps = found["steps"]
    outcome = Outcome(
        tuple(map(RankFacts, held, sent)),
        tuple(step["seconds"] for step in steps),
        tuple((step["step"], step["loss"]) for step in steps),
        tuple((one["step"], one["loss"]) for one in found["evaluations"]),
        tuple(notes),
    )
    lead = (
        f"{found['parameters']:,} parameters, engine {settings.engine}, {len(steps)} steps of "
        f"{settings.batch} x {settings.sequence} bytes on {found['text']['name']}."
    )
    title = f"Run of {settings.preset}, {settings.ranks} ranks"
    return run_page(title, lead, outcome, plans, is_timed=bool(settings.machine))
