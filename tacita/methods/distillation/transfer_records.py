"""What the server of prediction transfer writes down in a round: uploads in a fixed order, and the agent's walk."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from tacita.core.types import Arrays, Doubles, Floats, Ints, Keys, Ragged
from tacita.learn.training.central_state import TrainingSamples
from tacita.messages import PerClientField, SparseRows
from tacita.methods.distillation.selection import CandidateWalk
from tacita.methods.distillation.weighting import expand_weights_to_entries

WALK = "walk/"


def sort_by_sender(sent: PerClientField) -> tuple[Keys, Ragged]:
    """Clients and their uploads, in an order that does not depend on where people live."""
    rows = sent.value
    assert isinstance(rows, SparseRows)
    score = rows.value.astype(np.float32)
    n_senders = len(sent.sender)
    uploads = Ragged.from_pairs(rows.client, rows.item, n_senders, {"score": score})
    order = np.argsort(sent.sender)
    senders = sent.sender[order]
    return senders, uploads.take(order)


def build_upload_samples(users: Ints, uploads: Ragged, weights: Doubles) -> TrainingSamples:
    """What the server's model learns: uploaded scores, weighed by client."""
    user_of_entry = users[uploads.rows()]
    user = user_of_entry.astype(np.int64)
    item = uploads.ids.astype(np.int64)
    weight = expand_weights_to_entries(weights, uploads)
    label = uploads.values["score"]
    return TrainingSamples(user, item, label, weight)


def encode_walk(walk: CandidateWalk, clients: Keys) -> Arrays:
    """A walk as named arrays, as the server keeps it until the round is over."""
    state: Arrays = {}
    for field in fields(CandidateWalk):
        name = f"{WALK}{field.name}"
        state[name] = getattr(walk, field.name)
    state[f"{WALK}clients"] = clients
    return state


def decode_walk_with_clients(state: Arrays) -> tuple[CandidateWalk, Keys]:
    """The walk of this round, and its clients."""
    columns = {}
    for field in fields(CandidateWalk):
        name = f"{WALK}{field.name}"
        columns[field.name] = state[name]
    clients = state[f"{WALK}clients"]
    return CandidateWalk(**columns), clients


def has_walk(state: Arrays) -> bool:
    """Whether an agent walked in this round."""
    return f"{WALK}clients" in state


def drop_walk(state: Arrays) -> Arrays:
    """The state without a walk."""
    rest: Arrays = {}
    for name, value in state.items():
        if not name.startswith(WALK):
            rest[name] = value
    return rest


def align_uploads_with_walk(uploads: Ragged, clients: Keys, logits: Floats, walkers: Keys) -> tuple[Ragged, Floats]:
    """Uploads and their logits in the order of a walk's clients; a client that sent nothing has an empty row."""
    order = np.argsort(walkers)
    senders = clients[uploads.rows()]
    place = np.searchsorted(walkers, senders, sorter=order)
    row = order[place]
    columns = {"score": uploads.values["score"], "logit": logits}
    n_walkers = len(walkers)
    aligned = Ragged.from_pairs(row, uploads.ids, n_walkers, columns)
    score = aligned.values["score"]
    scores = Ragged(aligned.ptr, aligned.ids, {"score": score})
    return scores, aligned.values["logit"]
