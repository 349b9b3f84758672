"""Calibrate the retractions of a finished run: people leave for trial, and the folder keeps what that left of them.

The sums that devices carry are damped while the run trains, so what is measured is the run's own damping; another one
that would leave less is named for the next run.
"""

from __future__ import annotations

from pathlib import Path

from tacita.core.errors import TacitaError
from tacita.core.files import lock_folder, remove_temporary_files, write_json
from tacita.runs.assembly import ALL_CORES, Machine
from tacita.runs.calibration import ALPHAS, FILE, RETRACTION, CalibrationRecord, calibrate
from tacita.runs.forgetting.request_service import reopen_run
from tacita.runs.run_folder import finish_change, read_result


def calibrate_run(folder: Path, leavers: int = 20, machine: Machine = ALL_CORES) -> tuple[CalibrationRecord, str]:
    """Find what retractions of a run leave of leavers, write it into its folder, and say what follows from it."""
    read_result(folder)
    with lock_folder(folder):
        remove_temporary_files(folder)
        finish_change(folder)
        run = reopen_run(folder, machine)
        part = next((one for one in run.federation.parts if one.name == RETRACTION), None)
        if part is None:
            raise TacitaError(f"{folder} has no part '{RETRACTION}' to calibrate; train with --method retraction.")
        options = part.config.model_dump()
        rounds = int(run.progress.results[0]["best_round"]) or None
        alphas = sorted({*ALPHAS, options["alpha"]})
        made = calibrate(run.federation, leavers, rounds=rounds, alphas=alphas)
        found = CalibrationRecord(
            alpha=options["alpha"], ratio=round(made.ratios[options["alpha"]], 4), best_alpha=made.alpha,
            best_ratio=round(made.ratio, 4), plain=round(made.plain, 4), leavers=made.leavers, rounds=made.rounds,
        )  # fmt: skip
        write_json(folder / FILE, found.model_dump())
    return found, _describe_calibration(found, options["most_ratio"])


def _describe_calibration(found: CalibrationRecord, most: float) -> str:
    took = f"alpha = {found.alpha:g} leaves {found.ratio:.2f} of the distance to training again"
    if found.ratio <= most:
        return f"{took}: who leaves is retracted."
    better = ""
    if found.best_ratio <= most:
        better = f", or train with alpha = {found.best_alpha:g}, which would leave {found.best_ratio:.2f}"
    return f"{took}, above {most:g}: for who leaves the table goes back to a checkpoint instead{better}."
