"""Short runs of prediction transfer with a curious server: what the attacks of `scores` read from the uploads it gets.

Each setting (how much of the hard label is mixed in, with and without swaps) is trained by itself for a few rounds, and
what every client told last, and the time before, is attacked. The threshold is a half throughout: at alpha 0.5 it parts
liked from other items. It took the place of alpha itself, which read less at alpha 0.3 on ml-100k; the AUC depends on
no such choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, Broadcast, Keys, Ragged, ServerState
from tacita.federation.devices import LocalDevices, RoundReply, empty_local_devices
from tacita.federation.rounds import begin_block, run_round, start_run
from tacita.learn.scores import SCORES
from tacita.messages import SparseRows
from tacita.methods.distillation.round_draws import RoundDraws
from tacita.methods.distillation.transfer import Transfer
from tacita.research.audit.score_attacks import AttackOptions, attack_scores
from tacita.research.experiments.shared_base import with_parts
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble

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

    uploads: list[tuple[Keys, Ragged]] = field(default_factory=list)  # a round each: who, and what they told

    def exchange(
        self, fed: Federation, server: ServerState, down: Broadcast, question: str, chosen: Keys | None = None
    ) -> RoundReply:
        told = super().exchange(fed, server, down, question, chosen)
        if SCORES in told.total.each:
            sent = told.total.each[SCORES]
            assert isinstance(sent.value, SparseRows)
            columns = {"score": sent.value.value.astype(np.float32)}
            lists = Ragged.from_pairs(sent.value.client, sent.value.item, len(sent.sender), columns)
            self.uploads.append((sent.sender, lists))
        return told


def list_settings(part: Transfer) -> list[dict[str, Any]]:
    """Options of every row; PTF-FedRec mixes nothing, so only its swap is switched."""
    swap = part.config.swap or SWAP
    alphas = ALPHAS if part.config.scheme == "mix" else (0.0,)
    return [{"alpha": alpha, "swap": share} for alpha in alphas for share in (0.0, swap)]


def audit_scores(
    config: RunConfig,
    machine: Machine,
    rounds: int,
    on_done: Callable[[int, int], None] | None = None,
    on_data: Callable[[BlockStream], None] | None = None,
) -> dict[str, Any]:
    """What the server reads under each setting, beside controls."""
    fed = assemble(config, machine)
    part = next((one for one in fed.parts if isinstance(one, Transfer)), None)
    if part is None:
        raise TacitaError(
            f"method '{config.method}' sends no scores, so there are none to read; audit one such as fedkdrec."
        )
    if on_data:
        on_data(fed.stream)
    settings, rows = list_settings(part), []
    for done, options in enumerate(settings):
        if on_done:
            on_done(done, len(settings))
        changed = [{**one, **options} if one["name"] == part.name else one for one in fed.config.parts or []]
        rows.append(
            {**options, **audit_setting(with_parts(fed, fed.config.model_copy(update={"parts": changed})), rounds)}
        )
    if on_done:
        on_done(len(settings), len(settings))
    return {
        "data": fed.stream.name,
        "method": config.method,
        "backbone": fed.backbone.name,
        "rounds": rounds,
        "seed": config.seed,
        "rows": rows,
        "note": NO_BUDGET,
    }


def audit_setting(fed: Federation, rounds: int) -> dict[str, Any]:
    """A few rounds of the first block, then every attack on what each client told last."""
    devices = RecordingDevices(empty_local_devices(fed).clients)
    progress = start_run(fed, devices)
    begin_block(fed, progress, 0)
    for _ in range(rounds):
        progress.server, _ = run_round(fed, progress.server, devices)
    block = fed.stream.blocks[0]
    clients, last, before = collect_last_uploads(devices.uploads)
    at = np.argsort(fed.stream.user_keys)
    users = at[np.searchsorted(fed.stream.user_keys, clients, sorter=at)]
    dice = RoundDraws(fed.draws, clients, 0, rounds, public=True)
    found = attack_scores(last, block.train.take(users), dice, AttackOptions(THRESHOLD), before)
    return {"threshold": THRESHOLD, "clients": len(clients), "attacks": {name: found[name] for name in ATTACKS}}


def collect_last_uploads(uploads: list[tuple[Keys, Ragged]]) -> tuple[Keys, Ragged, Ragged]:
    """Everybody who told something, what each told last, and the time before: nothing, where that was the first."""
    clients = np.unique(np.concatenate([who for who, _ in uploads])) if uploads else np.zeros(0, np.uint64)
    last = before = _empty_uploads(len(clients))
    for who, told in uploads:
        at = np.searchsorted(clients, who)
        before = _replace_lists(before, at, last.take(at))
        last = _replace_lists(last, at, told)
    return clients, last, before


def _empty_uploads(n: int) -> Ragged:
    return replace(Ragged.empty(n), values={"score": np.zeros(0, np.float32)})


def _replace_lists(lists: Ragged, at: Any, replacement: Ragged) -> Ragged:
    """The same lists with some of them replaced."""
    stays = ~np.isin(lists.rows(), at)
    rows = np.concatenate([lists.rows()[stays], at[replacement.rows()]])
    score = np.concatenate([lists.values["score"][stays], replacement.values["score"]])
    return Ragged.from_pairs(rows, np.concatenate([lists.ids[stays], replacement.ids]), len(lists), {"score": score})
