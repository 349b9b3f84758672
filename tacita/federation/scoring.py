"""From what a device holds to scores over the catalogue; the same path validates, tests and serves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.types import Block, CohortView, Down, Floats, Ints, Keys, Ragged, ServerState
from tacita.federation.clients import users_view
from tacita.models.scores import own_scores, sample_scores, score_all
from tacita.round.device_state import OWN, DeviceState
from tacita.round.parts import Part, Purpose, overrides, owner_of
from tacita.round.plan import Plan


def rows_of(lists: Ragged, users: Ints) -> Ragged:
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
    down: Down
    purpose: Purpose
    past: Ragged | None = None  # what everybody did in earlier blocks, where the model reads it

    def __call__(self, users: Ints) -> Floats:
        correcting = [p for p in self.plan.parts if overrides(p, "predict")]
        changing = any(overrides(p, "serving") for p in self.plan.parts)
        answering, anew = (owner_of(self.plan.parts, hook) for hook in ("answers", "predict_anew"))
        backbone, view = self.plan.backbone, None
        if correcting or answering or anew or changing or backbone.reads_context or backbone.reads_history:
            view = self.view(users)
        scores = anew.predict_anew(view, self.purpose) if anew and view else None
        if scores is None and answering and view:
            scores = answering.answers(view)
        if scores is None:
            scores = self._own_model(users, view)
        for part in correcting:
            assert view is not None
            scores = part.predict(view, scores, self.purpose)
        return scores

    def some(self, users: Ints, only: Ragged) -> Floats | None:
        """Scores of some items of each user, flat; None where a model can only score the catalogue."""
        answering, anew = (owner_of(self.plan.parts, hook) for hook in ("answers", "predict_anew"))
        if any(overrides(p, "predict") for p in self.plan.parts):
            return None
        made = anew.predict_anew(self.view(users), self.purpose, only) if anew else None
        if made is not None:
            return made
        if answering is not None:
            return self._answered(answering, users, only)
        backbone = self.plan.backbone
        if not backbone.grouped or OWN in self.clients.lists:
            return None  # a catalogue costs such models little, or has rows of one's own
        return sample_scores(backbone, self.view(users), only.rows(), only.ids)

    def _answered(self, answering: Part, users: Ints, only: Ragged) -> Floats | None:
        """What another model than the run's own says of some items, where it can leave out the others."""
        some = self.down.some
        if some is None or not overrides(answering, "answers_some"):
            return None
        return answering.answers_some(self.view(users, replace(self.down, own=lambda all: some(all, only))), only)

    def view(self, users: Ints, down: Down | None = None) -> CohortView:
        """What the devices of these users score with."""
        view = users_view(self.clients, self.server, self.block, users, self.keys, down or self.down)
        past = rows_of(self.past, users) if self.past is not None else None
        if self.plan.backbone.reads_history:
            view = replace(view, history=past)
        for part in self.plan.parts:
            view = part.serving(view)
        return view

    def table(self) -> Floats:
        """The item rows that devices score with; a part may serve others than the server's own."""
        return self.view(np.zeros(1, np.int32)).items

    def _own_model(self, users: Ints, view: CohortView | None) -> Floats:
        """The run's own model, read with the private vectors of these users."""
        backbone, server, clients = self.plan.backbone, self.server, self.clients
        found = None if view is None else backbone.score_history(view)
        if found is not None:
            return found
        context = None if view is None else backbone.context(view)
        private, items = (clients.private[users], server.items) if view is None else (view.private, view.items)
        if OWN not in clients.lists:
            return score_all(backbone, private, server.heads, items, context)
        table = items.copy()  # rows that are newer than the last broadcast
        table[: len(clients.common[OWN])] = clients.common[OWN]
        return own_scores(backbone, private, server.heads, table, clients.list_of(OWN, users), context)
