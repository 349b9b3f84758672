"""From what a device holds to scores over the catalogue; the same path validates, tests and serves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tacita.core.types import Block, Broadcast, CohortView, Floats, Ints, Keys, Ragged, ServerState
from tacita.federation.clients import build_user_view
from tacita.models.scorer import Scorer
from tacita.models.scoring import score_catalogue, score_samples, score_with_own_rows
from tacita.models.statistic_model import StatisticModel
from tacita.round.device_state import OWN_ROWS, DeviceState
from tacita.round.plan import Plan
from tacita.round.serving import Purpose, Serving


def take_user_lists(lists: Ragged, users: Ints) -> Ragged:
    """The users' lists; nothing for users who came later."""
    n_missing = max(0, int(users.max(initial=-1)) + 1 - len(lists))
    padding = np.full(n_missing, lists.ptr[-1])
    return replace(lists, ptr=np.append(lists.ptr, padding)).take(users)


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
    past: Ragged | None = None  # what users did in earlier blocks, where the model reads it

    def __call__(self, users: Ints) -> Floats:
        backbone = self.plan.backbone
        if not (self.plan.serving_parts or backbone.reads_context or backbone.reads_history):
            return self._score_own_model(users, None)
        view, servings = self._collect_servings(users)
        scores = _find_override_scores(servings, None)
        if scores is None:
            scores = self._score_own_model(users, view)
        for serving in servings:
            if serving.correction is not None:
                scores = serving.correction(scores)
        return scores

    def score_listed_items(self, users: Ints, only: Ragged) -> Floats | None:
        """Scores of some items of each user, flat; None where a model can only score the catalogue."""
        if any("correction" in part.serves for part in self.plan.parts):
            return None
        backbone = self.plan.backbone
        is_overridden = any("scores" in part.serves for part in self.plan.parts)
        is_personal = any("personal_scores" in part.serves for part in self.plan.parts)
        if is_overridden or is_personal:
            if is_overridden and self.broadcast.per_client_items is None:
                return None  # what was sent to clients is of the whole catalogue
            servings = self._collect_servings(users, self._broadcast_to_score(only))[1]
            scores = _find_override_scores(servings, only)
            if scores is not None or is_overridden:
                return scores
        if not isinstance(backbone, Scorer) or not backbone.grouped or OWN_ROWS in self.clients.lists:
            return None  # a catalogue costs such models little, or has rows of one's own
        return score_samples(backbone, self.build_scoring_view(users), only.rows(), only.ids)

    def _broadcast_to_score(self, only: Ragged) -> Broadcast:
        """What clients get to be scored on some items; a part that needs the whole catalogue is asked for it later."""
        per_client_items = self.broadcast.per_client_items
        if per_client_items is None:
            return self.broadcast
        return replace(self.broadcast, per_client=lambda clients: per_client_items(clients, only))

    def _collect_servings(self, users: Ints, broadcast: Broadcast | None = None) -> tuple[CohortView, list[Serving]]:
        """What the devices of these users score with, and what each part says of that."""
        view = self._view_users(users, broadcast)
        servings = []
        scoring = []
        for part in self.plan.serving_parts:
            if "view" not in part.serves:
                scoring.append(part)
                continue
            serving = part.serve(view, self.purpose)
            if serving.view is not None:
                view = serving.view
        for part in scoring:  # with the view that all parts leave
            servings.append(part.serve(view, self.purpose))
        return view, servings

    def _view_users(self, users: Ints, broadcast: Broadcast | None) -> CohortView:
        sent = broadcast or self.broadcast
        view = build_user_view(self.clients, self.server, self.block, users, self.keys, sent)
        if not self.plan.backbone.reads_history:
            return view
        past = take_user_lists(self.past, users) if self.past is not None else None
        return replace(view, history=past)

    def build_scoring_view(self, users: Ints) -> CohortView:
        """What the devices of these users score with."""
        return self._collect_servings(users)[0]

    def build_item_table(self) -> Floats:
        """The item rows that devices score with; a part may serve others than the server's own."""
        return self.build_scoring_view(np.zeros(1, np.int32)).items

    def _score_own_model(self, users: Ints, view: CohortView | None) -> Floats:
        """The run's own model, read with the private vectors of these users."""
        if isinstance(self.plan.backbone, StatisticModel):
            assert view is not None
            return self.plan.backbone.score_history(view)
        backbone = self.plan.scorer
        heads = self.server.heads
        context = None
        private = self.clients.private[users]
        items = self.server.items
        if view is not None:
            context = backbone.list_context_items(view)
            private = view.private
            items = view.items
        if OWN_ROWS not in self.clients.lists:
            return score_catalogue(backbone, private, heads, items, context)
        common = self.clients.common[OWN_ROWS]
        table = items.copy()  # rows that are newer than the last broadcast
        table[: len(common)] = common
        own_rows = self.clients.read_list(OWN_ROWS, users)
        return score_with_own_rows(backbone, private, heads, table, own_rows, context)


def _find_override_scores(servings: list[Serving], only: Ragged | None) -> Floats | None:
    """Scores by another model than the run's own: one that a device makes for its user comes first."""
    for serving in servings:
        if serving.personal_scores is not None:
            scores = serving.personal_scores(only)
            if scores is not None:
                return scores
    for serving in servings:
        if serving.scores is not None:
            return serving.scores(only)
    return None
