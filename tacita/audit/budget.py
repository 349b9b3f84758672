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

from tacita.audit.null_space import NullSpace, auc
from tacita.audit.rebuilding import as_lists, rebuild
from tacita.audit.trials import Scene, membership, n_draws, some_of
from tacita.core.config import PrivacyConfig, RunConfig
from tacita.core.draws import Draws
from tacita.core.errors import TacitaError
from tacita.core.types import Bools, Doubles, ServerState, Stream
from tacita.federation.rounds import begin_block, run_block, start
from tacita.lab.assembling import Machine, assemble, build
from tacita.models.tally.model import STATE, as_tally
from tacita.models.tally.noised import unit_vectors
from tacita.models.tally.private import PrivateTally, axes_in
from tacita.round.plan import Federation

READERS = {
    "null_space": "null space of B",
    "energy": "energy in B",
    "server": "the server's own sum",
}
NOISES = 5  # noise draws for every draw of people
NO_NOISE = 1e3  # an epsilon that leaves practically none


@dataclass(frozen=True)
class Readings:
    """How much each known history looks like one that took part, by every reader."""

    of: dict[str, Doubles]

    @staticmethod
    def made(server: ServerState, known: Bools) -> Readings:
        axes, gram = axes_in(server.heads), server.parts[STATE]["gram"]
        inside = known[:, axes.inputs]
        release = rebuild(server.heads["weights"])
        vectors = unit_vectors(as_lists(known), axes.inputs, axes.scale, axes.centre)
        read = inside[:, release.items]
        whole = NullSpace(release.inverse)
        return Readings(
            {
                "null_space": -NullSpace.of(release).energy(read),
                "energy": -whole.energy(read),
                "server": np.einsum("uk,uk->u", vectors @ gram, vectors),
            }
        )


def told_apart(scene: Scene, backbone: PrivateTally, tell: Callable[[], None]) -> dict[str, dict[str, float]]:
    """AUC of every reader: those inside against those absent; control: the same people and a release without both."""
    found: dict[str, dict[str, list[float]]] = {name: {"found": [], "control": []} for name in READERS}
    for draw, (inside, absent) in enumerate(scene.draws()):
        known = [some_of(scene.histories[one], 0.9, scene.seed) for one in (inside, absent)]
        for noise in range(NOISES):
            for n, (kind, gone) in enumerate((("found", (absent,)), ("control", (inside, absent)))):
                sets = scene.without(*gone)
                draws = Draws(scene.seed, f"audit {draw} {noise} {n}")
                server = backbone.released_from(scene.server, as_lists(sets), draws)
                both = [Readings.made(server, one).of for one in known]
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
    on_data: Callable[[Stream], None] | None = None,
) -> dict[str, Any]:
    """A row for tally as it is, one without noise among as many items, and one for every epsilon."""
    delta = config.privacy.delta
    plain = config.model_copy(update={"privacy": PrivacyConfig()})
    fed = assemble(plain, machine)
    if on_data:
        on_data(fed.stream)
    people = int((fed.stream.blocks[0].train.counts() > 0).sum())
    steps = [0, 2 * n_draws(people) + n_draws(people) * (len(epsilons) + 1)]

    def tell() -> None:
        steps[0] += 1
        if on_done:
            on_done(min(steps), steps[1])

    rows = [_plain_row(fed, tell)]
    for epsilon in [NO_NOISE, *sorted(epsilons, reverse=True)]:
        privacy = PrivacyConfig(epsilon=epsilon, delta=delta, blocks=1)
        changed = plain.model_copy(update={"privacy": privacy, "backbone": {"name": "tally"}})
        backbone = build(changed)[0]
        assert isinstance(backbone, PrivateTally)
        if epsilon == NO_NOISE:
            backbone = _sized(backbone, max(epsilons), delta)
        rows.append(_row(replace(fed, config=changed, backbone=backbone), backbone, epsilon, tell))
    return {"data": fed.stream.name, "people": people, "delta": delta, "noise_draws": NOISES, "rows": rows}


class _Sized(PrivateTally):
    """Among as many items as another budget would choose."""

    like: PrivateTally

    def s_of(self, server: ServerState, question: str) -> float:
        return super().s_of(server, question) if len(server.heads["inputs"]) else self.like.s_of(server, question)


def _sized(backbone: PrivateTally, epsilon: float, delta: float) -> PrivateTally:
    made = _Sized(backbone.config, backbone.privacy)
    made.like = PrivateTally(backbone.config, PrivacyConfig(epsilon=epsilon, delta=delta, blocks=1))
    return made


def _scene(fed: Federation) -> Scene:
    progress = start(fed)
    begin_block(fed, progress, 0)
    return Scene.of(as_tally(fed.backbone), progress.server, fed.stream.blocks[0].train, fed.config.seed)


def _quality(fed: Federation) -> float | None:
    """The selecting metric on the first block's validation items."""
    progress = start(fed)
    begin_block(fed, progress, 0)
    run_block(fed, progress, lambda report, now: None)
    return progress.best_score if progress.best_score >= 0 else None


def _plain_row(fed: Federation, tell: Callable[[], None]) -> dict[str, Any]:
    found = membership(_scene(fed), tell)
    if found["found"] is None:
        raise TacitaError("too few people have five items or more in the first block, so there is nothing to audit.")
    none = {"found": None, "control": None}
    first = {"found": found["found"], "control": found["control"]}
    return {"setting": "no budget", "items": int(fed.stream.blocks[0].n_items), "valid": _quality(fed),
            "readers": {"null_space": first, "energy": none, "server": none}}  # fmt: skip


def _row(fed: Federation, backbone: PrivateTally, epsilon: float, tell: Callable[[], None]) -> dict[str, Any]:
    scene = _scene(fed)
    server = backbone.released_from(scene.server, as_lists(scene.histories), Draws(scene.seed))
    name = "as many items, practically no noise" if epsilon == NO_NOISE else f"epsilon {epsilon:g}"
    readers = told_apart(scene, backbone, tell)
    return {"setting": name, "items": len(server.heads["inputs"]), "valid": _quality(fed), "readers": readers}
