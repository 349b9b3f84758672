"""From what a device holds to scores over the catalogue; the same path validates, tests and serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tacita.backbones.base import Backbone
from tacita.backbones.scores import own_scores, score_all
from tacita.clients import OWN, users_view
from tacita.device_state import DeviceState
from tacita.evaluate import ScoreUsers
from tacita.methods.base import Part, Purpose, overrides
from tacita.types import Arrays, Block, Floats, Ints, Keys, Ragged, ServerState


def rows_of(lists: Ragged, users: Ints) -> Ragged:
    """The users' lists; nothing for users who came later."""
    short = max(0, int(users.max(initial=-1)) + 1 - len(lists))
    return replace(lists, ptr=np.append(lists.ptr, np.full(short, lists.ptr[-1]))).take(users)


def device_scorer(
    backbone: Backbone,
    parts: Sequence[Part],
    server: ServerState,
    clients: DeviceState,
    block: Block,
    keys: Keys,
    received: dict[str, Arrays],
    purpose: Purpose,
    past: Ragged | None = None,
) -> ScoreUsers:
    """Scores as the users' own devices would compute them, corrections by parts included."""
    correcting = [p for p in parts if overrides(p, "predict")]

    def score_users(users: Ints) -> Floats:
        if backbone.reads_history:
            view = users_view(clients, server, block, users, keys, received)
            found = backbone.score_history(replace(view, history=rows_of(past, users) if past is not None else None))
            assert found is not None
            return found
        private, context = clients.private[users], None
        if correcting or backbone.reads_context:
            view = users_view(clients, server, block, users, keys, received)
            context = backbone.context(view)
        if OWN not in clients.lists:
            scores = score_all(backbone, private, server.heads, server.items, context)
        else:
            table = server.items.copy()  # rows that are newer than the last broadcast
            table[: len(clients.common[OWN])] = clients.common[OWN]
            own = clients.list_of(OWN, users)
            scores = own_scores(backbone, private, server.heads, table, own, context)
        if correcting:
            for part in correcting:
                scores = part.predict(view, scores, purpose)
        return scores

    return score_users
