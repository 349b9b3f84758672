"""What the server of prediction transfer holds, as a value: a model of everybody it knows, uploads, counts, agents."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from tacita.core.draws import Draws
from tacita.core.types import Arrays, Floats, Ints, Keys, Longs, Ragged
from tacita.kernels.hashing import hash_owners
from tacita.learn.training.central_model import CentralModel
from tacita.learn.training.central_state import CentralState, InteractionGraph
from tacita.methods.distillation.candidates import UploadHistory
from tacita.models.scorer import Scorer

MODEL = "model/"
NOTES = "notes/"
AGENTS = "agents/"


@dataclass(frozen=True)
class Teacher:
    """The server's side between two rounds. Rows of `last` and of the model's users are the clients in `names`."""

    names: Keys
    model: CentralState
    last: Ragged  # the items of each client's last upload, with its scores
    recent: UploadHistory  # of the last round's uploads
    ever: UploadHistory  # of all uploads
    agents: Arrays = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)  # of the last round, for the log

    @staticmethod
    def new(backbone: Scorer, draws: Draws, items: Floats) -> Teacher:
        """Knows nobody; its item rows are those that clients start from, where the models are alike."""
        no_keys = np.zeros(0, np.uint64)
        central = CentralModel(backbone, _make_empty_graph())
        state = central.init_state(draws, no_keys, no_keys)
        no_counts = np.zeros(0, np.int64)
        history = UploadHistory(no_counts, 0)
        no_uploads = make_empty_score_lists(0)
        teacher = Teacher(no_keys, state, no_uploads, history, history)
        return teacher.with_items(backbone, draws, items)

    def with_items(self, backbone: Scorer, draws: Draws, items: Floats) -> Teacher:
        """Rows for items that are new."""
        known = len(self.model.values["items"])
        if known == len(items):
            return self
        fresh = items[known:]
        if items.shape[1] != backbone.item_width:  # another kind of model than the clients': it starts by itself
            n_items = len(items)
            numbers = np.arange(known, n_items, dtype=np.uint64)
            keys = hash_owners(draws.public("server-items"), numbers)
            fresh = backbone.init_items(draws, keys)
        model = _append_rows(self.model, "items", fresh)
        n_new = len(items) - known
        recent = _append_items(self.recent, n_new)
        ever = _append_items(self.ever, n_new)
        return replace(self, model=model, recent=recent, ever=ever)

    def with_clients(self, backbone: Scorer, draws: Draws, clients: Keys) -> Teacher:
        """Rows for clients that are new, as the model has newcomers start."""
        fresh = np.setdiff1d(clients, self.names)
        if len(fresh) == 0:
            return self
        end = self.last.ptr[-1]
        ends = np.full(len(fresh), end)
        ptr = np.append(self.last.ptr, ends)
        vectors = backbone.init_private(draws, fresh)
        return replace(
            self,
            names=np.append(self.names, fresh),
            model=_append_rows(self.model, "users", vectors),
            last=replace(self.last, ptr=ptr),
        )

    def find_rows(self, clients: Keys) -> Ints:
        """Places of clients that are known."""
        order = np.argsort(self.names)
        place = np.searchsorted(self.names, clients, sorter=order)
        return order[place].astype(np.int32)

    @property
    def n_items(self) -> int:
        return len(self.model.values["items"])

    def build_upload_graph(self, above: float = 0.0) -> InteractionGraph:
        """Clients and the items of their last uploads, weighed by score; scores up to `above` make no edge."""
        score = self.last.values["score"]
        is_edge = score > above
        user = self.last.rows()[is_edge]
        item = self.last.ids[is_edge]
        n_users = len(self.names)
        weight = score[is_edge]
        return InteractionGraph.from_edges(user, item, weight, n_users, self.n_items)

    def with_uploads(self, users: Ints, uploads: Ragged) -> Teacher:
        """After another round's uploads, one list for each of these users."""
        n_users = len(self.names)
        is_silent = np.ones(n_users, bool)
        is_silent[users] = False
        old_rows = self.last.rows()
        stays = is_silent[old_rows]
        old_score = self.last.values["score"]
        new_rows = users[uploads.rows()]
        silent_rows = old_rows[stays]
        rows = np.concatenate([silent_rows, new_rows])
        old_ids = self.last.ids[stays]
        ids = np.concatenate([old_ids, uploads.ids])
        new_score = uploads.values["score"]
        silent_score = old_score[stays]
        score = np.concatenate([silent_score, new_score])
        n_users = len(self.names)
        last = Ragged.from_pairs(rows, ids, n_users, {"score": score})
        recent = UploadHistory.from_upload(uploads, self.n_items)
        ever = self.ever.add_history(recent)
        return replace(self, last=last, recent=recent, ever=ever)

    def to_arrays(self) -> Arrays:
        """Everything as named arrays, as the server keeps it."""
        arrays: Arrays = {"names": self.names}
        model_arrays = self.model.to_arrays()
        for name, value in model_arrays.items():
            arrays[f"{MODEL}{name}"] = value
        arrays["last/ptr"] = self.last.ptr
        arrays["last/ids"] = self.last.ids
        arrays["last/score"] = self.last.values["score"]
        for name, history in (("recent", self.recent), ("ever", self.ever)):
            arrays[f"{name}/counts"] = history.counts
            n_uploads = np.array([history.n_uploads], np.int64)
            arrays[f"{name}/uploads"] = n_uploads
        for name, note in self.notes.items():
            value = np.array([note])
            arrays[f"{NOTES}{name}"] = value
        for name, value in self.agents.items():
            arrays[f"{AGENTS}{name}"] = value
        return arrays

    @staticmethod
    def from_arrays(arrays: Arrays) -> Teacher:
        """The teacher that `to_arrays` wrote."""
        notes = {}
        saved_notes = _select_prefix(arrays, NOTES)
        for name, value in saved_notes.items():
            notes[name] = float(value[0])
        return Teacher(
            names=arrays["names"],
            model=CentralState.from_arrays(_select_prefix(arrays, MODEL)),
            last=Ragged(arrays["last/ptr"], arrays["last/ids"], {"score": arrays["last/score"]}),
            recent=_read_history(arrays, "recent"),
            ever=_read_history(arrays, "ever"),
            agents=_select_prefix(arrays, AGENTS),
            notes=notes,
        )


def _select_prefix(arrays: Arrays, prefix: str) -> Arrays:
    """Arrays whose names begin with a prefix, under names without it."""
    selected: Arrays = {}
    for name, value in arrays.items():
        if name.startswith(prefix):
            selected[name.removeprefix(prefix)] = value
    return selected


def _read_history(arrays: Arrays, name: str) -> UploadHistory:
    saved = arrays[f"{name}/uploads"]
    n_uploads = int(saved[0])
    return UploadHistory(arrays[f"{name}/counts"], n_uploads)


def _append_items(history: UploadHistory, n_items: int) -> UploadHistory:
    """A history with more items, which no upload had yet."""
    no_uploads = np.zeros(n_items, np.int64)
    counts = np.append(history.counts, no_uploads)
    return UploadHistory(counts, history.n_uploads)


def make_empty_score_lists(n_clients: int) -> Ragged:
    """Lists of items with scores, empty for every client."""
    ptr = np.zeros(n_clients + 1, np.int64)
    no_items = np.zeros(0, np.int32)
    no_scores = np.zeros(0, np.float32)
    return Ragged(ptr, no_items, {"score": no_scores})


def _make_empty_graph() -> InteractionGraph:
    no_edges = np.zeros(0, np.int64)
    no_weights = np.zeros(0)
    return InteractionGraph.from_edges(no_edges, no_edges, no_weights, 0, 1)


def _append_rows(state: CentralState, name: str, fresh: Floats) -> CentralState:
    """More rows of one kind, which no step has moved yet."""
    values = dict(state.values)
    old_rows = state.values[name]
    values[name] = np.concatenate([old_rows, fresh])
    moments = dict(state.moments)
    for kind in ("mean", "square"):
        moment = moments[f"{name}.{kind}"]
        no_moment = np.zeros_like(fresh)
        grown = np.concatenate([moment, no_moment])
        moments[f"{name}.{kind}"] = grown
    steps: Longs = moments[f"{name}.steps"]
    n_new = len(fresh)
    no_steps = np.zeros(n_new, steps.dtype)
    grown_steps = np.append(steps, no_steps)
    moments[f"{name}.steps"] = grown_steps
    return CentralState(values, moments)
