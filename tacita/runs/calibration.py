"""Find the damping with which people's retractions come closest to retraining (sharing spec D.2).

Some people leave for trial: the run is trained with them and, round by round the same, without them. The lab knows what
they added, so every damping can be tried on the two tables. The share of their distance that remains is the ratio that
part `retraction` asks for.
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
from tacita.core.types import Bools, CohortView, Doubles, Floats, Keys, StateUpdate
from tacita.federation.rounds import begin_block, make_initial_progress, run_round
from tacita.kernels.hashing import hash_owners
from tacita.messages import SparseRows, Upload
from tacita.methods import Part
from tacita.methods.sharing.accumulators import accumulate_retraction
from tacita.methods.sharing.update_log import to_sparse_rows
from tacita.round.part import PartConfig
from tacita.round.plan import Federation

ALPHAS = tuple(round(0.01 * k, 2) for k in range(51))
FILE = "calibration.json"
RETRACTION = "retraction"
WITHDRAWING_PARTS = (RETRACTION, "withdrawal")


class CalibrationRecord(BaseModel):
    """The calibration of a run: of the damping that its devices used for their sums, and of the best one."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    alpha: float = Field(ge=0, le=1)  # of the run
    ratio: float = Field(ge=0)  # what it leaves of the distance to retraining
    best_alpha: float = Field(ge=0, le=1)
    best_ratio: float = Field(ge=0)
    plain: float = Field(ge=0)  # what pure subtraction leaves
    leavers: int = Field(ge=1)
    rounds: int = Field(ge=1)


def with_calibrated_ratio(federation: Federation, folder: Path) -> Federation:
    """A run with the ratio of its calibration: part `retraction` takes it, unless a ratio was set."""
    path = folder / FILE
    if not path.is_file():
        return federation
    record = validate_model(CalibrationRecord, read_json(path), str(path))
    parts = tuple(_with_measured_ratio(part, record) for part in federation.parts)
    return replace(federation, parts=parts)


def _with_measured_ratio(part: Part, record: CalibrationRecord) -> Part:
    """Part `retraction` with a measured ratio; every other part, and one that has a ratio, stays as it is."""
    if part.name != RETRACTION:
        return part
    options = part.config.model_dump()
    was_measured_for_it = options["alpha"] == record.alpha
    if options["ratio"] is not None or not was_measured_for_it:
        return part
    config = part.config.model_copy(update={"ratio": record.ratio})
    return type(part)(config, part.context)


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


def measure_retraction_calibration(
    federation: Federation,
    leavers: int = 20,
    groups: int = 1,
    rounds: int | None = None,
    alphas: Sequence[float] = ALPHAS,
) -> Calibration:
    """Train once with everybody and once without each group of leavers; block 0 only."""
    if federation.config.train.aggregation != "fixed":
        raise TacitaError("retractions need train.aggregation = 'fixed'; there is nothing to calibrate.")
    leaver_groups = _draw_leavers(federation, leavers, groups)
    n_rounds = rounds or federation.config.train.rounds
    nobody = np.zeros(0, np.uint64)
    with_everybody = train_rounds(federation, n_rounds, nobody, leaver_groups)
    group_ratios: list[list[float]] = []
    for number, group in enumerate(leaver_groups):
        without = train_rounds(federation, n_rounds, group)
        ratios = []
        for alpha in alphas:
            ratio = compute_distance_ratio(with_everybody, without.table, number, alpha)
            ratios.append(ratio)
        group_ratios.append(ratios)
    median = np.median(np.array(group_ratios), axis=0)
    best = int(median.argmin())
    return Calibration(
        alpha=alphas[best],
        ratio=float(median[best]),
        plain=float(median[0]),
        ratios=dict(zip(alphas, median.tolist(), strict=True)),
        leavers=leavers * groups,
        rounds=n_rounds,
    )


def _draw_leavers(federation: Federation, leavers: int, groups: int) -> Keys:
    """The keys (groups, leavers) of people with data in block 0 who leave for trial."""
    block = federation.stream.blocks[0]
    keys = federation.stream.user_keys[: block.n_users]
    people = keys[block.train.counts() > 0]
    n_leavers = leavers * groups
    if not 1 <= n_leavers < len(people):
        raise TacitaError(f"{groups} groups of {leavers} leavers out of {len(people)} people leave nobody; take fewer.")
    hashes = hash_owners(federation.draws.public("leavers"), people)
    first = np.argsort(hashes, kind="stable")[:n_leavers]
    return people[first].reshape(groups, leavers)


@dataclass(frozen=True)
class CalibrationTraining:
    """A table, and what each group of the watched added to it in every round."""

    table: Floats
    additions: list[list[Doubles]]  # group -> round -> (items, width)
    other_weights: list[list[float]]  # group -> round -> the weight of all but one of its people


def compute_distance_ratio(with_group: CalibrationTraining, without: Floats, group: int, alpha: float) -> float:
    """The distance to the table that never saw a group, after its retraction, over that before."""
    other_weights = with_group.other_weights[group]
    damping = []
    for weight in other_weights:
        remaining = 1 - alpha * weight
        damping.append(max(1e-3, remaining))
    retraction = accumulate_retraction(with_group.additions[group], damping)
    before = with_group.table.astype(np.float64)
    after = with_group.table + retraction
    distance_before = float(np.linalg.norm(before - without))
    distance_after = float(np.linalg.norm(after - without))
    return distance_after / max(distance_before, 1e-300)


@dataclass(frozen=True)
class WatchedUpload:
    """An upload of a round: all senders and weights, and the rows of the watched senders."""

    sender: Keys
    weight: Doubles
    rows: SparseRows


class UploadWatcher(Part):
    """Notes the uploads of a round, with the rows of some senders."""

    name = "watches"
    watched: Keys
    uploads: list[WatchedUpload]

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, StateUpdate]:
        rows = to_sparse_rows(upload.values["rows"])
        is_watched = np.isin(upload.sender, self.watched)
        watched_upload = WatchedUpload(
            sender=upload.sender.copy(),
            weight=upload.weight.copy(),
            rows=_select_rows(rows, is_watched[rows.client]),
        )
        self.uploads.append(watched_upload)
        return upload, {}


def _select_rows(rows: SparseRows, selection: Bools) -> SparseRows:
    """A copy of some rows."""
    client = rows.client[selection]
    item = rows.item[selection].copy()
    value = rows.value[selection].copy()
    return SparseRows(client, item, value)


def train_rounds(federation: Federation, rounds: int, away: Keys, watched: Any = ()) -> CalibrationTraining:
    """Rounds of block 0 without some people; `watched`: groups whose additions are kept, (groups, people)."""
    parts = [part for part in federation.parts if part.name not in WITHDRAWING_PARTS]
    uploads: list[WatchedUpload] = []
    if len(watched):
        parts.append(_build_watcher(federation, watched, uploads))
    federation = replace(federation, parts=tuple(parts))
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    settings = federation.config.train
    server_lr = settings.server_lr
    n_clients = len(progress.devices.choose_clients(federation, progress.server))
    denominator = settings.denominator or float(n_clients)
    federation = _fix_denominator(federation, denominator)
    additions: list[list[Doubles]] = [[] for _ in watched]
    other_weights: list[list[float]] = [[] for _ in watched]
    for _ in range(rounds):
        uploads.clear()
        server = progress.server
        clients = progress.devices.choose_clients(federation, server)
        staying = clients[~np.isin(clients, away)]
        after, _ = run_round(federation, server, progress.devices, staying)
        weights = [float(upload.weight.sum()) for upload in uploads]
        total_weight = sum(weights)
        for number, group in enumerate(watched):
            addition, own_weight = _sum_additions(uploads, group, server.items.shape)
            other_weight = total_weight - own_weight
            applied_addition = server_lr * addition / denominator
            additions[number].append(applied_addition)
            applied_weight = server_lr * other_weight / denominator
            other_weights[number].append(applied_weight)
        progress.server = after
    return CalibrationTraining(progress.server.items, additions, other_weights)


def _build_watcher(federation: Federation, watched: Any, uploads: list[WatchedUpload]) -> UploadWatcher:
    watcher = UploadWatcher(PartConfig(), federation.learner.context)
    watcher.watched = np.asarray(watched).reshape(-1)
    watcher.uploads = uploads
    return watcher


def _fix_denominator(federation: Federation, denominator: float) -> Federation:
    """The same run over the denominator that the round has with everybody."""
    settings = federation.config.train.model_copy(update={"denominator": denominator})
    config = federation.config.model_copy(update={"train": settings})
    return replace(federation, config=config)


def _sum_additions(uploads: Sequence[WatchedUpload], group: Keys, shape: Sequence[int]) -> tuple[Doubles, float]:
    """The group's addition to the sum of a round, and the mean weight of its participants."""
    total = np.zeros(shape)
    group_weight = 0.0
    n_participants = 0
    for upload in uploads:
        is_member = np.isin(upload.sender, group)
        member_weights = upload.weight[is_member]
        group_weight = group_weight + float(member_weights.sum())
        n_participants = n_participants + int((member_weights > 0).sum())
        rows = upload.rows
        is_members = is_member[rows.client]
        clients = rows.client[is_members]
        items = rows.item[is_members]
        values = rows.value[is_members]
        weights = upload.weight[clients, None]
        np.add.at(total, items, weights * values)
    return total, group_weight / max(1, n_participants)
