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

AGENTS = "agents/"


@dataclass(frozen=True)
class Teacher:
    """The server's side between two rounds. Rows of `last` and of the model's users are the clients in `names`."""

    names: Keys
    model: CentralState
    last: Ragged  # what each client told last, with its score
    recent: UploadHistory  # of the last round's uploads
    ever: UploadHistory  # of all uploads
    agents: Arrays = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)  # of the last round, for the log

    @staticmethod
    def new(backbone: Scorer, draws: Draws, items: Floats) -> Teacher:
        """Knows nobody; its item rows are those that clients start from, where the models are alike."""
        nobody, nothing = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
        state = CentralModel(backbone, _empty_graph()).init_state(draws, nobody, nothing)
        none = UploadHistory(np.zeros(0, np.int64), 0)
        empty = Ragged(np.zeros(1, np.int64), np.zeros(0, np.int32), {"score": np.zeros(0, np.float32)})
        return Teacher(nobody, state, empty, none, none).with_items(backbone, draws, items)

    def with_items(self, backbone: Scorer, draws: Draws, items: Floats) -> Teacher:
        """Rows for items that are new."""
        known = len(self.model.values["items"])
        if known == len(items):
            return self
        fresh = items[known:]
        if items.shape[1] != backbone.item_width:  # another kind of model than the clients': it starts by itself
            numbers = np.arange(known, len(items), dtype=np.uint64)
            fresh = backbone.init_items(draws, hash_owners(draws.public("server-items"), numbers))
        more = len(items) - known
        recent, ever = (
            UploadHistory(np.append(one.counts, np.zeros(more, np.int64)), one.n_uploads)
            for one in (self.recent, self.ever)
        )
        return replace(self, model=_append_rows(self.model, "items", fresh), recent=recent, ever=ever)

    def with_clients(self, backbone: Scorer, draws: Draws, clients: Keys) -> Teacher:
        """Rows for clients that are new, as the model has newcomers start."""
        fresh = np.setdiff1d(clients, self.names)
        if len(fresh) == 0:
            return self
        ptr = np.append(self.last.ptr, np.full(len(fresh), self.last.ptr[-1]))
        return replace(
            self,
            names=np.append(self.names, fresh),
            model=_append_rows(self.model, "users", backbone.init_private(draws, fresh)),
            last=replace(self.last, ptr=ptr),
        )

    def find_rows(self, clients: Keys) -> Ints:
        """Places of clients that are known."""
        order = np.argsort(self.names)
        return order[np.searchsorted(self.names, clients, sorter=order)].astype(np.int32)

    def build_graph(self, above: float = 0.0) -> InteractionGraph:
        """Who told what last, by how much; what is told as no more than `above` joins nobody."""
        joined = self.last.values["score"] > above
        user, item = self.last.rows()[joined], self.last.ids[joined]
        weight = self.last.values["score"][joined]
        return InteractionGraph.from_edges(user, item, weight, len(self.names), len(self.model.values["items"]))

    def with_uploads(self, users: Ints, uploads: Ragged) -> Teacher:
        """After another round's uploads, one list for each of these users."""
        keep = np.ones(len(self.names), bool)
        keep[users] = False
        stays = keep[self.last.rows()]
        rows = np.concatenate([self.last.rows()[stays], users[uploads.rows()]])
        ids = np.concatenate([self.last.ids[stays], uploads.ids])
        score = np.concatenate([self.last.values["score"][stays], uploads.values["score"]])
        recent = UploadHistory.of(uploads, len(self.model.values["items"]))
        last = Ragged.from_pairs(rows, ids, len(self.names), {"score": score})
        return replace(self, last=last, recent=recent, ever=self.ever.plus(recent))

    def arrays(self) -> Arrays:
        out: Arrays = {"names": self.names, **{f"model/{k}": v for k, v in self.model.arrays().items()}}
        out |= {"last/ptr": self.last.ptr, "last/ids": self.last.ids, "last/score": self.last.values["score"]}
        for name, one in (("recent", self.recent), ("ever", self.ever)):
            out |= {f"{name}/counts": one.counts, f"{name}/uploads": np.array([one.n_uploads], np.int64)}
        out |= {f"notes/{k}": np.array([v]) for k, v in self.notes.items()}
        return out | {f"{AGENTS}{k}": v for k, v in self.agents.items()}

    @staticmethod
    def of(arrays: Arrays) -> Teacher:
        def under(prefix: str) -> Arrays:
            return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}

        last = Ragged(arrays["last/ptr"], arrays["last/ids"], {"score": arrays["last/score"]})
        recent, ever = (
            UploadHistory(arrays[f"{name}/counts"], int(arrays[f"{name}/uploads"][0])) for name in ("recent", "ever")
        )
        notes = {k: float(v[0]) for k, v in under("notes/").items()}
        return Teacher(
            arrays["names"], CentralState.from_arrays(under("model/")), last, recent, ever, under(AGENTS), notes
        )


def _empty_graph() -> InteractionGraph:
    nothing = np.zeros(0, np.int64)
    return InteractionGraph.from_edges(nothing, nothing, np.zeros(0), 0, 1)


def _append_rows(state: CentralState, name: str, fresh: Floats) -> CentralState:
    """More rows of one kind, which no step has moved yet."""
    values = {**state.values, name: np.concatenate([state.values[name], fresh])}
    moments = dict(state.moments)
    for kind in ("mean", "square"):
        moments[f"{name}.{kind}"] = np.concatenate([moments[f"{name}.{kind}"], np.zeros_like(fresh)])
    steps: Longs = moments[f"{name}.steps"]
    moments[f"{name}.steps"] = np.append(steps, np.zeros(len(fresh), steps.dtype))
    return CentralState(values, moments)
