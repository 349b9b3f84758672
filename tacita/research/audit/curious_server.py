"""Short runs of prediction transfer with a curious server: what the attacks of `score_attacks` read from uploads.

Each setting (how much of the hard label is mixed in, with and without swaps) is trained by itself for a few rounds. The
attacks read what every client uploaded last, and the time before. The threshold is a half throughout: at alpha 0.5 it
parts liked from other items. It took the place of alpha itself, which read less at alpha 0.3 on ml-100k; the AUC
depends on no such choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.types import Broadcast, Keys, Longs, Ragged, ServerState
from tacita.federation.device_protocol import RoundReply
from tacita.federation.devices import LocalDevices, empty_local_devices
from tacita.federation.rounds import begin_block, make_initial_progress, run_round
from tacita.learn.scores import SCORES
from tacita.messages import SparseRows
from tacita.methods.distillation.round_draws import RoundDraws
from tacita.methods.distillation.transfer import PredictionTransfer
from tacita.research.audit.audit_progress import AuditTable, OnData, OnStep
from tacita.research.audit.score_attacks import AttackOptions, attack_scores
from tacita.research.experiments.shared_base import with_parts
from tacita.round.plan import Federation
from tacita.round.question import Question
from tacita.runs.assembly import Machine, assemble_federation

ALPHAS = (0.0, 0.3, 0.5)
THRESHOLD = 0.5
SWAP = 0.1  # of the paper, where the run itself swaps nothing
ATTACKS = {
    "auc": "score against label (AUC)",
    "threshold_f1": "threshold (F1)",
    "top_f1": "top guess (F1)",
    "order_f1": "order (F1)",
}
NO_BUDGET = "No epsilon is claimed: sampling, mixing and swapping are no mechanism with a budget."


@dataclass
class RecordingDevices(LocalDevices):
    """Devices in this process, and every upload that the server could read."""

    uploads: list[tuple[Keys, Ragged]] = field(default_factory=list)  # a round each: the senders, and their scores

    def exchange(
        self,
        federation: Federation,
        server: ServerState,
        broadcast: Broadcast,
        question: Question,
        chosen: Keys | None = None,
    ) -> RoundReply:
        reply = super().exchange(federation, server, broadcast, question, chosen)
        if SCORES in reply.total.each:
            sent = reply.total.each[SCORES]
            rows = sent.value
            assert isinstance(rows, SparseRows)
            columns = {"score": rows.value.astype(np.float32)}
            n_clients = len(sent.sender)
            lists = Ragged.from_pairs(rows.client, rows.item, n_clients, columns)
            self.uploads.append((sent.sender, lists))
        return reply


def list_settings(part: PredictionTransfer) -> list[dict[str, Any]]:
    """Options of every row; PTF-FedRec mixes nothing, so only its swap is switched."""
    swap = part.config.swap or SWAP
    alphas = ALPHAS if part.config.scheme == "mix" else (0.0,)
    settings = []
    for alpha in alphas:
        settings.append({"alpha": alpha, "swap": 0.0})
        settings.append({"alpha": alpha, "swap": swap})
    return settings


def audit_scores(
    config: RunConfig,
    machine: Machine,
    rounds: int,
    on_done: OnStep = None,
    on_data: OnData = None,
) -> AuditTable:
    """What the server reads under each setting, with controls."""
    federation = assemble_federation(config, machine)
    part = _require_transfer(federation, config)
    if on_data:
        on_data(federation.stream)
    settings = list_settings(part)
    rows = []
    for done, options in enumerate(settings):
        if on_done:
            on_done(done, len(settings))
        changed = _with_part_options(federation, part, options)
        findings = audit_setting(changed, rounds)
        rows.append({**options, **findings})
    if on_done:
        on_done(len(settings), len(settings))
    return {
        "data": federation.stream.name,
        "method": config.method,
        "backbone": federation.backbone.name,
        "rounds": rounds,
        "seed": config.seed,
        "rows": rows,
        "note": NO_BUDGET,
    }


def _require_transfer(federation: Federation, config: RunConfig) -> PredictionTransfer:
    """The part that sends scores; a method without one is refused."""
    for part in federation.parts:
        if isinstance(part, PredictionTransfer):
            return part
    raise TacitaError(
        f"method '{config.method}' sends no scores, so there are none to read; audit one such as fedkdrec."
    )


def _with_part_options(federation: Federation, part: PredictionTransfer, options: dict[str, Any]) -> Federation:
    """The federation with other options of one part."""
    specs = []
    for spec in federation.config.parts or []:
        if spec["name"] == part.name:
            spec = {**spec, **options}
        specs.append(spec)
    config = federation.config.model_copy(update={"parts": specs})
    return with_parts(federation, config)


def audit_setting(federation: Federation, rounds: int) -> AuditTable:
    """A few rounds of the first block, then every attack on what each client uploaded last."""
    devices = RecordingDevices(empty_local_devices(federation).clients)
    progress = make_initial_progress(federation, devices)
    begin_block(federation, progress, 0)
    for _ in range(rounds):
        progress.server, _ = run_round(federation, progress.server, devices)
    clients, last, before = collect_last_uploads(devices.uploads)
    users = _find_users(federation, clients)
    train = federation.stream.blocks[0].train
    liked = train.take(users)
    dice = RoundDraws(federation.draws, clients, 0, rounds, public=True)
    options = AttackOptions(THRESHOLD)
    figures = attack_scores(last, liked, dice, options, before)
    shown = {name: figures[name] for name in ATTACKS}
    return {"threshold": THRESHOLD, "clients": len(clients), "attacks": shown}


def _find_users(federation: Federation, clients: Keys) -> Longs:
    """The user that each client key belongs to."""
    keys = federation.stream.user_keys
    order = np.argsort(keys)
    place = np.searchsorted(keys, clients, sorter=order)
    return order[place]


def collect_last_uploads(uploads: list[tuple[Keys, Ragged]]) -> tuple[Keys, Ragged, Ragged]:
    """All who uploaded, what each uploaded last, and the time before: nothing, where that was the first."""
    clients = np.zeros(0, np.uint64)
    if uploads:
        senders = [keys for keys, _ in uploads]
        clients = np.unique(np.concatenate(senders))
    last = _empty_uploads(len(clients))
    before = last
    for keys, lists in uploads:
        place = np.searchsorted(clients, keys)
        before = _replace_lists(before, place, last.take(place))
        last = _replace_lists(last, place, lists)
    return clients, last, before


def _empty_uploads(n: int) -> Ragged:
    no_scores = {"score": np.zeros(0, np.float32)}
    return replace(Ragged.empty(n), values=no_scores)


def _replace_lists(lists: Ragged, places: Any, replacement: Ragged) -> Ragged:
    """The same lists with some of them replaced."""
    stays = ~np.isin(lists.rows(), places)
    old_rows = lists.rows()[stays]
    new_rows = places[replacement.rows()]
    old_score = lists.values["score"][stays]
    new_score = replacement.values["score"]
    rows = np.concatenate([old_rows, new_rows])
    ids = np.concatenate([lists.ids[stays], replacement.ids])
    score = np.concatenate([old_score, new_score])
    return Ragged.from_pairs(rows, ids, len(lists), {"score": score})
