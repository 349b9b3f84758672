"""Find the damping with which people's retractions come closest to retraining (sharing spec D.2).

Some people leave for trial: the run is trained with them and, round by round the same, without them. What they added is
known in the lab, so every damping can be tried on the two tables. What is left of their distance is the ratio that part
`retraction` asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tacita.core.config import validate_model
from tacita.core.errors import TacitaError
from tacita.core.files import read_json
from tacita.core.types import CohortView, Doubles, Floats, Keys, StateUpdate
from tacita.federation.rounds import begin_block, run_round, start_run
from tacita.kernels.hashing import hash_owners
from tacita.messages import Upload
from tacita.methods import Part
from tacita.methods.sharing.accumulators import accumulate_retraction
from tacita.methods.sharing.update_log import as_rows
from tacita.round.part import PartConfig
from tacita.round.plan import Federation

ALPHAS = tuple(round(0.01 * k, 2) for k in range(51))
FILE = "calibration.json"
RETRACTION = "retraction"


class CalibrationRecord(BaseModel):
    """What was found for a run: of the damping that its devices carried their sums with, and of the best one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    alpha: float = Field(ge=0, le=1)  # of the run
    ratio: float = Field(ge=0)  # what it leaves of the distance to retraining
    best_alpha: float = Field(ge=0, le=1)
    best_ratio: float = Field(ge=0)
    plain: float = Field(ge=0)  # what pure subtraction leaves
    leavers: int = Field(ge=1)
    rounds: int = Field(ge=1)


def apply_calibration(fed: Federation, folder: Path) -> Federation:
    """A run that knows what was found for it: its part `retraction` takes that ratio, where nobody set one."""
    path = folder / FILE
    if not path.is_file():
        return fed
    found = validate_model(CalibrationRecord, read_json(path), str(path))

    def with_ratio(part: Part) -> Part:
        options = part.config.model_dump()
        if part.name != RETRACTION or options["ratio"] is not None or options["alpha"] != found.alpha:
            return part
        return type(part)(part.config.model_copy(update={"ratio": found.ratio}), part.context)

    return replace(fed, parts=tuple(with_ratio(part) for part in fed.parts))


@dataclass(frozen=True)
class Calibration:
    """The best damping, what it leaves of the distance to retraining, and what pure subtraction leaves."""

    alpha: float
    ratio: float  # median over the groups of leavers
    plain: float  # the same at alpha = 0
    ratios: dict[float, float]
    leavers: int
    rounds: int

    def options(self) -> dict[str, Any]:
        """Of part `retraction`."""
        return {"alpha": self.alpha, "ratio": round(self.ratio, 4)}


def calibrate(
    fed: Federation, leavers: int = 20, groups: int = 1, rounds: int | None = None, alphas: Sequence[float] = ALPHAS
) -> Calibration:
    """Train once with everybody and once without each group of leavers; block 0 only."""
    if fed.config.train.aggregation != "fixed":
        raise TacitaError("retractions need train.aggregation = 'fixed'; there is nothing to calibrate.")
    block = fed.stream.blocks[0]
    people = fed.stream.user_keys[: block.n_users][block.train.counts() > 0]
    if not 1 <= leavers * groups < len(people):
        raise TacitaError(f"{groups} groups of {leavers} leavers out of {len(people)} people leave nobody; take fewer.")
    drawn = hash_owners(fed.draws.public("leavers"), people)
    chosen = people[np.argsort(drawn, kind="stable")[: leavers * groups]].reshape(groups, leavers)
    n_rounds = rounds or fed.config.train.rounds
    whole = train_rounds(fed, n_rounds, np.zeros(0, np.uint64), chosen)
    found: list[list[float]] = []
    for k, group in enumerate(chosen):
        without = train_rounds(fed, n_rounds, group)
        found.append([distance_ratio(whole, without.table, k, alpha) for alpha in alphas])
    median = np.median(np.array(found), axis=0)
    best = int(median.argmin())
    ratios = dict(zip(alphas, median.tolist(), strict=True))
    return Calibration(alphas[best], float(median[best]), float(median[0]), ratios, leavers * groups, n_rounds)


@dataclass(frozen=True)
class CalibrationTraining:
    """A table, and what each group of the watched added to it in every round."""

    table: Floats
    additions: list[list[Doubles]]  # group -> round -> (items, width)
    other_weights: list[list[float]]  # group -> round -> what all but one of it weighed


def distance_ratio(whole: CalibrationTraining, without: Floats, group: int, alpha: float) -> float:
    """The distance to the table that never saw a group, after its retraction, over that before."""
    damping = [max(1e-3, 1 - alpha * others) for others in whole.other_weights[group]]
    after = whole.table + accumulate_retraction(whole.additions[group], damping)
    before = float(np.linalg.norm(whole.table.astype(np.float64) - without))
    return float(np.linalg.norm(after - without)) / max(before, 1e-300)


def train_rounds(fed: Federation, rounds: int, away: Keys, watched: Any = ()) -> CalibrationTraining:
    """Rounds of block 0 without some people; `watched`: groups whose additions are kept, (groups, people)."""
    parts = tuple(part for part in fed.parts if part.name not in (RETRACTION, "withdrawal"))
    seen: list[tuple[int, Keys, Doubles, Any]] = []

    class Watches(Part):
        name = "watches"

        def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, StateUpdate]:
            seen.append((view.round, upload.sender.copy(), upload.weight.copy(), as_rows(upload.values["rows"])))
            _keep_watched(seen, np.asarray(watched).reshape(-1))
            return upload, {}

    plan = replace(fed, parts=(*parts, Watches(PartConfig(), fed.learner.context)) if len(watched) else parts)
    progress = start_run(plan)
    begin_block(plan, progress, 0)
    denominator = fed.config.train.denominator or float(len(progress.devices.choose_clients(plan, progress.server)))
    plan = _fix_denominator(plan, denominator)
    train, pieces, other_weights = fed.config.train, [[] for _ in watched], [[] for _ in watched]  # type: ignore[var-annotated]
    for _ in range(rounds):
        everybody = progress.devices.choose_clients(plan, progress.server)
        seen.clear()
        server = progress.server
        stay = everybody[~np.isin(everybody, away)]
        after, _ = run_round(plan, server, progress.devices, stay)
        weight = sum(float(one.sum()) for _, _, one, _ in seen)
        for k, group in enumerate(watched):
            piece, own = _sum_additions(seen, group, server.items.shape)
            pieces[k].append(train.server_lr * piece / denominator)
            other_weights[k].append(train.server_lr * (weight - own) / denominator)
        progress.server = after
    return CalibrationTraining(progress.server.items, pieces, other_weights)


def _fix_denominator(plan: Federation, denominator: float) -> Federation:
    """The same run over the denominator that the round has with everybody."""
    train = plan.config.train.model_copy(update={"denominator": denominator})
    return replace(plan, config=plan.config.model_copy(update={"train": train}))


def _keep_watched(seen: list[Any], watched: Keys) -> None:
    """Rows of others are not needed, only what they weigh."""
    number, sender, weight, rows = seen[-1]
    mine = np.isin(sender, watched)[rows.client]
    kept = type(rows)(rows.client[mine], rows.item[mine].copy(), rows.value[mine].copy())
    seen[-1] = (number, sender, weight, kept)


def _sum_additions(seen: list[Any], group: Keys, shape: tuple[int, ...]) -> tuple[Doubles, float]:
    """What a group added to the sum of a round, and what one of it weighed who took part."""
    total, weighed, n = np.zeros(shape), 0.0, 0
    for _, sender, weight, rows in seen:
        inside = np.isin(sender, group)
        weighed, n = weighed + float(weight[inside].sum()), n + int((weight[inside] > 0).sum())
        mine = inside[rows.client]
        np.add.at(total, rows.item[mine], weight[rows.client[mine], None] * rows.value[mine])
    return total, weighed / max(1, n)
