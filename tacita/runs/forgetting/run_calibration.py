"""Calibrate the retractions of a finished run: people leave for trial, and the folder keeps what that left of them.

The sums that devices carry are damped while the run trains, so what is measured is the run's own damping; another one
that would leave less is named for the next run.
"""

from __future__ import annotations

from pathlib import Path

from tacita.core.errors import TacitaError
from tacita.core.files import lock_folder, remove_temporary_files, write_json
from tacita.round.part import Part
from tacita.runs.assembly import ALL_CORES, Machine
from tacita.runs.calibration import ALPHAS, FILE, RETRACTION, CalibrationRecord, measure_retraction_calibration
from tacita.runs.forgetting.reopened_run import ReopenedRun, reopen_run
from tacita.runs.run_folder import finish_change, read_result


def calibrate_run(folder: Path, leavers: int = 20, machine: Machine = ALL_CORES) -> tuple[CalibrationRecord, str]:
    """Measure what retractions of a run leave of leavers, write it into its folder, and say what follows from it."""
    read_result(folder)
    with lock_folder(folder):
        remove_temporary_files(folder)
        finish_change(folder)
        run = reopen_run(folder, machine)
        options = _find_retraction(run).config.model_dump()
        record = _calibrate_retractions(run, leavers, options["alpha"])
        write_json(folder / FILE, record.model_dump())
    return record, _describe_calibration(record, options["most_ratio"])


def _find_retraction(run: ReopenedRun) -> Part:
    for part in run.federation.parts:
        if part.name == RETRACTION:
            return part
    raise TacitaError(f"{run.saved.folder} has no part '{RETRACTION}' to calibrate; train with --method retraction.")


def _calibrate_retractions(run: ReopenedRun, leavers: int, alpha: float) -> CalibrationRecord:
    """What the run's own damping leaves, beside the best of others."""
    rounds = int(run.progress.results[0]["best_round"]) or None
    alphas = sorted({*ALPHAS, alpha})
    calibration = measure_retraction_calibration(run.federation, leavers, rounds=rounds, alphas=alphas)
    return CalibrationRecord(
        alpha=alpha,
        ratio=round(calibration.ratios[alpha], 4),
        best_alpha=calibration.alpha,
        best_ratio=round(calibration.ratio, 4),
        plain=round(calibration.plain, 4),
        leavers=calibration.leavers,
        rounds=calibration.rounds,
    )


def _describe_calibration(record: CalibrationRecord, most: float) -> str:
    result = f"alpha = {record.alpha:g} leaves {record.ratio:.2f} of the distance to training again"
    if record.ratio <= most:
        return f"{result}: who leaves is retracted."
    hint = ""
    if record.best_ratio <= most:
        hint = f", or train with alpha = {record.best_alpha:g}, which would leave {record.best_ratio:.2f}"
    return f"{result}, above {most:g}: for who leaves the table goes back to a checkpoint instead{hint}."
