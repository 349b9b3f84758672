"""What to think of a run's headline number, against its controls."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tacita.report.formats import format_metric, format_score
from tacita.report.run_data import ControlResult, RunData

Callout = tuple[str, str]
"""(good, note or bad; a sentence)"""


def judge_run(run: RunData) -> list[Callout]:
    """What to think of the headline number: (good, note or bad, sentence)."""
    metric = run.main_metric
    if not math.isfinite(run.score):
        sentence = f"The method has no {format_metric(metric)} to show: nobody was tested, or training diverged."
        return [("bad", sentence)]
    judged = []
    for control in run.controls:
        if math.isfinite(control.mean[metric]):
            judged.append(control)
    if not judged:
        return [("note", "No control was run beside this method, so its numbers cannot be judged alone.")]
    callouts = [_report_defeat(run, control) for control in run.better_controls]
    if not callouts:
        callouts.append(_report_success(run, judged))
    for control in judged:
        lost_blocks = _list_lost_blocks(run, control)
        if lost_blocks and control not in run.better_controls:
            callouts.append(_report_lost_blocks(control, lost_blocks))
    return callouts


def _describe_scale(run: RunData) -> str:
    metric = format_metric(run.main_metric)
    return f"{metric}, {run.mean_label}"


def _report_defeat(run: RunData, control: ControlResult) -> Callout:
    control_score = format_score(control.mean[run.main_metric])
    own_score = format_score(run.score)
    numbers = f"{control_score} against {own_score}"
    kind = "note" if control.key == "linear" else "bad"
    scale = _describe_scale(run)
    sentence = f"Below {control.name}: {control.description} is better here ({numbers}; {scale})."
    return kind, sentence


def _report_success(run: RunData, controls: Sequence[ControlResult]) -> Callout:
    metric = run.main_metric
    best = max(controls, key=lambda control: control.mean[metric])
    best_score = format_score(best.mean[metric])
    own_score = format_score(run.score)
    numbers = f"{own_score} against {best_score} of {best.name}, the best of them"
    scale = _describe_scale(run)
    return "good", f"No control is better: {numbers} ({scale})."


def _list_lost_blocks(run: RunData, control: ControlResult) -> list[str]:
    """The blocks in which a control is better."""
    metric = run.main_metric
    lost = []
    for number, scores in enumerate(control.blocks):
        own_score = run.blocks[number].scores[metric]
        if own_score < scores[metric]:
            lost.append(str(number))
    return lost


def _report_lost_blocks(control: ControlResult, lost_blocks: Sequence[str]) -> Callout:
    plural = "s" if len(lost_blocks) > 1 else ""
    numbers = ", ".join(lost_blocks)
    blocks = f"block{plural} {numbers}"
    return "note", f"Not below {control.name} on the mean, but below it in {blocks}."
