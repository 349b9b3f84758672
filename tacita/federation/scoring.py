"""From what a device holds to scores over the catalogue; the same path validates, tests and serves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.types import Block, Broadcast, CohortView, Floats, Ints, Keys, Ragged, ServerState
from tacita.federation.clients import build_user_view
from tacita.models.scorer import Scorer
from tacita.models.scoring import score_all, score_samples, score_with_own_rows
from tacita.models.statistic_model import StatisticModel
from tacita.round.device_state import OWN_ROWS, DeviceState
from tacita.round.parts import Part, Purpose, find_deciding_part, overrides
from tacita.round.plan import Plan


def take_lists(lists: Ragged, users: Ints) -> Ragged:
    """The users' lists; nothing for users who came later."""
    short = max(0, int(users.max(initial=-1)) + 1 - len(lists))
    return replace(lists, ptr=np.append(lists.ptr, np.full(short, lists.ptr[-1]))).take(users)


@dataclass(frozen=True)
class DeviceScorer:
    """Scores as the users' own devices would compute them, corrections by parts included."""

    plan: Plan
    server: ServerState
    clients: DeviceState
    block: Block
    keys: Keys
    broadcast: Broadcast
    purpose: Purpose
    past: Ragged | None = None  # what everybody did in earlier blocks, where the model reads it

    def __call__(self, users: Ints) -> Floats:
        correcting = [p for p in self.plan.parts if overrides(p, "predict")]
        changing = any(overrides(p, "serving") for p in self.plan.parts)
        answering, anew = (find_deciding_part(self.plan.parts, hook) for hook in ("answers", "predict_anew"))
        backbone, view = self.plan.backbone, None
        if correcting or answering or anew or changing or backbone.reads_context or backbone.reads_history:
            view = self.build_view(users)
        scores = anew.predict_anew(view, self.purpose) if anew and view else None
        if scores is None and answering and view:
            scores = answering.answers(view)
        if scores is None:
            scores = self._score_own_model(users, view)
        for part in correcting:
            assert view is not None
            scores = part.predict(view, scores, self.purpose)
        return scores

    def score_items(self, users: Ints, only: Ragged) -> Floats | None:
        """Scores of some items of each user, flat; None where a model can only score the catalogue."""
        answering, anew = (find_deciding_part(self.plan.parts, hook) for hook in ("answers", "predict_anew"))
        if any(overrides(p, "predict") for p in self.plan.parts):
            return None
        made = anew.predict_anew(self.build_view(users), self.purpose, only) if anew else None
        if made is not None:
            return made
        if answering is not None:
            return self._score_override(answering, users, only)
        backbone = self.plan.backbone
        if not isinstance(backbone, Scorer) or not backbone.grouped or OWN_ROWS in self.clients.lists:
            return None  # a catalogue costs such models little, or has rows of one's own
        return score_samples(backbone, self.build_view(users), only.rows(), only.ids)

    def _score_override(self, answering: Part, users: Ints, only: Ragged) -> Floats | None:
        """What another model than the run's own says of some items, where it can leave out the others."""
        some = self.broadcast.per_client_items
        if some is None or not overrides(answering, "answers_some"):
            return None
        return answering.answers_some(
            self.build_view(users, replace(self.broadcast, per_client=lambda all: some(all, only))), only
        )

    def build_view(self, users: Ints, down: Broadcast | None = None) -> CohortView:
        """What the devices of these users score with."""
        view = build_user_view(self.clients, self.server, self.block, users, self.keys, down or self.broadcast)
        past = take_lists(self.past, users) if self.past is not None else None
        if self.plan.backbone.reads_history:
            view = replace(view, history=past)
        for part in self.plan.parts:
            view = part.serving(view)
        return view

    def item_table(self) -> Floats:
        """The item rows that devices score with; a part may serve others than the server's own."""
        return self.build_view(np.zeros(1, np.int32)).items

    def _score_own_model(self, users: Ints, view: CohortView | None) -> Floats:
        """The run's own model, read with the private vectors of these users."""
        backbone, server, clients = self.plan.backbone, self.server, self.clients
        if isinstance(backbone, StatisticModel):
            assert view is not None
            return backbone.score_history(view)
        scorer = self.plan.scorer
        context = None if view is None else scorer.context(view)
        private, items = (clients.private[users], server.items) if view is None else (view.private, view.items)
        if OWN_ROWS not in clients.lists:
            return score_all(scorer, private, server.heads, items, context)
        table = items.copy()  # rows that are newer than the last broadcast
        table[: len(clients.common[OWN_ROWS])] = clients.common[OWN_ROWS]
        return score_with_own_rows(scorer, private, server.heads, table, clients.read_list(OWN_ROWS, users), context)
