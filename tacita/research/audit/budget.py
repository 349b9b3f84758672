"""Who took part, read from what tally releases under a budget; the same attacks without noise and without a budget.

The first block is told with the whole budget. Tenths of the people stay in or are left out, as in trials.py, and every
release has noise of its own. Three readers of a history of which 90 % is known: the null-space reader of B; the energy
of the history in the matrix that B gives back, without a projector; and the server's, which has the noised sum itself
and looks how much of the history's own term is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tacita.core.config import PrivacyConfig, RunConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, Bools, Doubles, ServerState
from tacita.federation.rounds import begin_block, run_block, start_run
from tacita.models.tally.model import STATE, require_tally
from tacita.models.tally.private_math import unit_vectors
from tacita.models.tally.private_tally import PrivateTally, read_axes
from tacita.research.audit.null_space import NullSpace, auc
from tacita.research.audit.reconstruction import as_lists, rebuild_inverse
from tacita.research.audit.tally_attacks import AttackTarget, attack_membership, count_draws, sample_items
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble, build_components

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
        axes, gram = read_axes(server.heads), server.parts[STATE]["gram"]
        inside = known[:, axes.inputs]
        release = rebuild_inverse(server.heads["weights"])
        vectors = unit_vectors(as_lists(known), axes.inputs, axes.scale, axes.centre)
        read = inside[:, release.items]
        whole = NullSpace(release.inverse)
        return ReaderScores(
            {
                "null_space": -NullSpace.of(release).energy(read),
                "energy": -whole.energy(read),
                "server": np.einsum("uk,uk->u", vectors @ gram, vectors),
            }
        )


def measure_membership(
    scene: AttackTarget, backbone: PrivateTally, tell: Callable[[], None]
) -> dict[str, dict[str, float]]:
    """AUC of every reader: those inside against those absent; control: the same people and a release without both."""
    found: dict[str, dict[str, list[float]]] = {name: {"found": [], "control": []} for name in READERS}
    for draw, (inside, absent) in enumerate(scene.draw_groups()):
        known = [sample_items(scene.histories[one], 0.9, scene.seed) for one in (inside, absent)]
        for noise in range(NOISE_DRAWS):
            for n, (kind, gone) in enumerate((("found", (absent,)), ("control", (inside, absent)))):
                sets = scene.drop_groups(*gone)
                draws = Draws(scene.seed, f"audit {draw} {noise} {n}")
                server = backbone.simulate_release(scene.server, as_lists(sets), draws)
                both = [ReaderScores.compute(server, one).by_reader for one in known]
                for name in READERS:
                    one = auc(both[0][name], both[1][name])
                    found[name][kind] += [] if one is None else [one]
        tell()
    return {name: {kind: float(np.mean(values)) for kind, values in both.items()} for name, both in found.items()}


def audit_budget(
    config: RunConfig,
    machine: Machine,
    epsilons: list[float],
    on_done: Callable[[int, int], None] | None = None,
    on_data: Callable[[BlockStream], None] | None = None,
) -> dict[str, Any]:
    """A row for tally as it is, one without noise among as many items, and one for every epsilon."""
    delta = config.privacy.delta
    plain = config.model_copy(update={"privacy": PrivacyConfig()})
    fed = assemble(plain, machine)
    if on_data:
        on_data(fed.stream)
    people = int((fed.stream.blocks[0].train.counts() > 0).sum())
    steps = [0, 2 * count_draws(people) + count_draws(people) * (len(epsilons) + 1)]

    def tell() -> None:
        steps[0] += 1
        if on_done:
            on_done(min(steps), steps[1])

    rows = [_make_plain_row(fed, tell)]
    for epsilon in [NO_NOISE, *sorted(epsilons, reverse=True)]:
        privacy = PrivacyConfig(epsilon=epsilon, delta=delta, blocks=1)
        changed = plain.model_copy(update={"privacy": privacy, "backbone": {"name": "tally"}})
        backbone = build_components(changed)[0]
        assert isinstance(backbone, PrivateTally)
        if epsilon == NO_NOISE:
            backbone = _match_inputs(backbone, max(epsilons), delta)
        rows.append(_make_row(replace(fed, config=changed, backbone=backbone), backbone, epsilon, tell))
    return {"data": fed.stream.name, "people": people, "delta": delta, "noise_draws": NOISE_DRAWS, "rows": rows}


class _MatchedInputsTally(PrivateTally):
    """Among as many items as another budget would choose."""

    reference: PrivateTally

    def term_deviation(self, server: ServerState, question: str) -> float:
        return (
            super().term_deviation(server, question)
            if len(server.heads["inputs"])
            else self.reference.term_deviation(server, question)
        )


def _match_inputs(backbone: PrivateTally, epsilon: float, delta: float) -> PrivateTally:
    made = _MatchedInputsTally(backbone.config, backbone.privacy)
    made.reference = PrivateTally(backbone.config, PrivacyConfig(epsilon=epsilon, delta=delta, blocks=1))
    return made


def _build_target(fed: Federation) -> AttackTarget:
    progress = start_run(fed)
    begin_block(fed, progress, 0)
    return AttackTarget.of(require_tally(fed.backbone), progress.server, fed.stream.blocks[0].train, fed.config.seed)


def _measure_quality(fed: Federation) -> float | None:
    """The selecting metric on the first block's validation items."""
    progress = start_run(fed)
    begin_block(fed, progress, 0)
    run_block(fed, progress, lambda report, now: None)
    return progress.best_score if progress.best_score >= 0 else None


def _make_plain_row(fed: Federation, tell: Callable[[], None]) -> dict[str, Any]:
    found = attack_membership(_build_target(fed), tell)
    if found["found"] is None:
        raise TacitaError("too few people have five items or more in the first block, so there is nothing to audit.")
    none = {"found": None, "control": None}
    first = {"found": found["found"], "control": found["control"]}
    return {"setting": "no budget", "items": int(fed.stream.blocks[0].n_items), "valid": _measure_quality(fed),
            "readers": {"null_space": first, "energy": none, "server": none}}  # fmt: skip


def _make_row(fed: Federation, backbone: PrivateTally, epsilon: float, tell: Callable[[], None]) -> dict[str, Any]:
    scene = _build_target(fed)
    server = backbone.simulate_release(scene.server, as_lists(scene.histories), Draws(scene.seed))
    name = "as many items, practically no noise" if epsilon == NO_NOISE else f"epsilon {epsilon:g}"
    readers = measure_membership(scene, backbone, tell)
    return {"setting": name, "items": len(server.heads["inputs"]), "valid": _measure_quality(fed), "readers": readers}
