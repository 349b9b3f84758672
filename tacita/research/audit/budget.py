"""Who took part, read from what tally releases under a budget; the same attacks without noise and without a budget.

The first block is released with the whole budget. Tenths of the people stay in or are left out, as in
tally_attacks.py, and every release has noise of its own. Three readers know 90 % of a history. The first is the
null-space reader of B. The second takes the energy of the history in the matrix that B gives back, without a projector.
The third is the server, which has the noised sum itself and measures how much of the history's own term is in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.config import PrivacyConfig, RunConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import Bools, Doubles, ServerState
from tacita.federation.rounds import begin_block, make_initial_progress, run_block
from tacita.models.tally.model import STATE, require_tally
from tacita.models.tally.private_math import build_unit_vectors
from tacita.models.tally.private_tally import PrivateTally, read_axes
from tacita.research.audit.audit_progress import Advance, AuditTable, OnData, OnStep, StepCounter
from tacita.research.audit.null_space import AucSamples, NullSpace
from tacita.research.audit.reconstruction import rebuild_inverse, sets_to_lists
from tacita.research.audit.tally_attacks import AttackTarget, attack_membership, count_group_draws
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble_federation, build_components

READERS = {
    "null_space": "null space of B",
    "energy": "energy in B",
    "server": "the server's own sum",
}
NOISE_DRAWS = 5  # noise draws for every draw of people
NO_NOISE = 1e3  # an epsilon that leaves practically none


@dataclass(frozen=True)
class ReaderScores:
    """How much each known history looks like one that took part, by every reader."""

    by_reader: dict[str, Doubles]

    @staticmethod
    def compute(server: ServerState, known: Bools) -> ReaderScores:
        axes = read_axes(server.heads)
        gram = server.parts[STATE]["gram"]
        release = rebuild_inverse(server.heads["weights"])
        known_inputs = known[:, axes.inputs]
        known_released = known_inputs[:, release.items]
        null_space = NullSpace.from_inverse(release)
        whole_space = NullSpace(release.inverse)
        lists = sets_to_lists(known)
        vectors = build_unit_vectors(lists, axes.inputs, axes.scale, axes.centre)
        projected = vectors @ gram
        server_scores = np.einsum("uk,uk->u", projected, vectors)
        scores = {
            "null_space": -null_space.compute_energy(known_released),
            "energy": -whole_space.compute_energy(known_released),
            "server": server_scores,
        }
        return ReaderScores(scores)


def measure_membership(target: AttackTarget, backbone: PrivateTally, advance: Advance) -> dict[str, dict[str, float]]:
    """AUC of every reader: those inside against those absent; control: the same people and a release without both."""
    aucs = {reader: AucSamples("found", "control") for reader in READERS}
    for draw, (inside, absent) in enumerate(target.draw_groups()):
        known_inside = target.sample_known(inside)
        known_absent = target.sample_known(absent)
        histories = {
            "found": target.drop_groups(absent),
            "control": target.drop_groups(inside, absent),
        }
        for noise in range(NOISE_DRAWS):
            for number, (kind, sets) in enumerate(histories.items()):
                purpose = f"audit {draw} {noise} {number}"
                draws = Draws(target.seed, purpose)
                lists = sets_to_lists(sets)
                server = backbone.simulate_release(target.server, lists, draws)
                inside_scores = ReaderScores.compute(server, known_inside).by_reader
                absent_scores = ReaderScores.compute(server, known_absent).by_reader
                for reader, samples in aucs.items():
                    samples.add_auc(kind, inside_scores[reader], absent_scores[reader])
        advance()
    return {reader: samples.compute_means() for reader, samples in aucs.items()}


def audit_budget(
    config: RunConfig,
    machine: Machine,
    epsilons: list[float],
    on_done: OnStep = None,
    on_data: OnData = None,
) -> AuditTable:
    """A row for tally as it is, one without noise among as many items, and one for every epsilon."""
    delta = config.privacy.delta
    plain_config = config.model_copy(update={"privacy": PrivacyConfig()})
    federation = assemble_federation(plain_config, machine)
    if on_data:
        on_data(federation.stream)
    n_users = count_active_users(federation)
    n_draws = count_group_draws(n_users)
    n_private_rows = len(epsilons) + 1
    total = 2 * n_draws + n_draws * n_private_rows
    steps = StepCounter(total, on_done)
    rows = [_measure_plain_row(federation, steps.advance)]
    for epsilon in [NO_NOISE, *sorted(epsilons, reverse=True)]:
        private_config = _with_budget(plain_config, epsilon, delta)
        backbone = build_components(private_config)[0]
        assert isinstance(backbone, PrivateTally)
        if epsilon == NO_NOISE:
            backbone = _build_noiseless_match(backbone, max(epsilons), delta)
        private_federation = replace(federation, config=private_config, backbone=backbone)
        row = _measure_row(private_federation, backbone, epsilon, steps.advance)
        rows.append(row)
    return {
        "data": federation.stream.name,
        "people": n_users,
        "delta": delta,
        "noise_draws": NOISE_DRAWS,
        "rows": rows,
    }


def count_active_users(federation: Federation) -> int:
    """How many have items in the first block."""
    counts = federation.stream.blocks[0].train.counts()
    return int((counts > 0).sum())


def _with_budget(config: RunConfig, epsilon: float, delta: float) -> RunConfig:
    """Plain tally with one budget for the first block."""
    privacy = PrivacyConfig(epsilon=epsilon, delta=delta, blocks=1)
    changes = {"privacy": privacy, "backbone": {"name": "tally"}}
    return config.model_copy(update=changes)


class _MatchedInputsTally(PrivateTally):
    """Among as many items as another budget would choose."""

    reference: PrivateTally

    def compute_term_deviation(self, server: ServerState, question: str) -> float:
        has_inputs = len(server.heads["inputs"]) > 0
        if has_inputs:
            return super().compute_term_deviation(server, question)
        return self.reference.compute_term_deviation(server, question)


def _build_noiseless_match(backbone: PrivateTally, epsilon: float, delta: float) -> PrivateTally:
    privacy = PrivacyConfig(epsilon=epsilon, delta=delta, blocks=1)
    matched = _MatchedInputsTally(backbone.config, backbone.privacy)
    matched.reference = PrivateTally(backbone.config, privacy)
    return matched


def _build_target(federation: Federation) -> AttackTarget:
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    backbone = require_tally(federation.backbone)
    train = federation.stream.blocks[0].train
    seed = federation.config.seed
    return AttackTarget.from_state(backbone, progress.server, train, seed)


def _measure_quality(federation: Federation) -> float | None:
    """The selecting metric on the first block's validation items."""
    progress = make_initial_progress(federation)
    begin_block(federation, progress, 0)
    run_block(federation, progress, lambda report, now: None)
    if progress.best_score < 0:
        return None
    return progress.best_score


def _measure_plain_row(federation: Federation, advance: Advance) -> AuditTable:
    figure = attack_membership(_build_target(federation), advance)
    if figure["found"] is None:
        raise TacitaError("too few people have five items or more in the first block, so there is nothing to audit.")
    not_measured = {"found": None, "control": None}
    null_space = {"found": figure["found"], "control": figure["control"]}
    return {
        "setting": "no budget",
        "items": int(federation.stream.blocks[0].n_items),
        "valid": _measure_quality(federation),
        "readers": {"null_space": null_space, "energy": not_measured, "server": not_measured},
    }


def _measure_row(federation: Federation, backbone: PrivateTally, epsilon: float, advance: Advance) -> AuditTable:
    target = _build_target(federation)
    lists = sets_to_lists(target.histories)
    draws = Draws(target.seed)
    server = backbone.simulate_release(target.server, lists, draws)
    name = f"epsilon {epsilon:g}"
    if epsilon == NO_NOISE:
        name = "as many items, practically no noise"
    readers = measure_membership(target, backbone, advance)
    return {
        "setting": name,
        "items": len(server.heads["inputs"]),
        "valid": _measure_quality(federation),
        "readers": readers,
    }
