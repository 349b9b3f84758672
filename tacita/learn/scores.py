"""scores: clients keep models of their own and send predictions; the server distils what it is told into its model.

Parameters travel once, as the table and heads that everybody starts from. A device keeps its private vector, its own
version of the rows it has touched and of the heads, and trains them whenever it takes part; Adam's moments start
afresh, unless they are kept beside what they move. What a device tells of its predictions, and what the server learns
from that, is the business of the one part that brings this learner along (`Tells`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from tacita.core.config import TrainConfig
from tacita.core.errors import TacitaError
from tacita.core.files import flatten_parts
from tacita.core.types import AnyArray, Arrays, CohortView, Floats, LocalModels, Ragged, ServerState, StateUpdate
from tacita.learn.training import Workspace, check_training
from tacita.learn.training.cohort import choose_stepper
from tacita.learn.training.local_models import build_local_models
from tacita.learn.training.stepper import CONTEXT, StepExtras
from tacita.messages import CohortReply, SparseRows, Spec, Total, Upload
from tacita.models.scorer import Scorer
from tacita.models.scoring import sigmoid
from tacita.round.device_state import PARTS
from tacita.round.learner import Learner, register
from tacita.round.part import Part, RunContext
from tacita.round.state import StateSpec
from tacita.round.task import CohortTask

SCORES = "scores"
HEAD = "head."
MOMENT_KINDS = ("mean", "square")


class PredictionPart(Part):
    """A part that says what devices tell of their predictions, and learns from it in its server step."""

    works_with: ClassVar[tuple[str, ...]] = (SCORES,)

    @property
    def evaluates_clients(self) -> bool:
        """Whether clients' own models recommend and are measured, so that they belong to the best round."""
        return False

    def check_server(self) -> None:
        """Refuse settings of the server's model that cannot work, before anything is trained."""

    @abstractmethod
    def choose_predictions(self, view: CohortView, own: Ragged, received: Ragged) -> Ragged:
        """What each client tells: items with a `score` in [0, 1].

        `own`: a client's samples of the round with `label` and `prediction`; `received`: what it was sent, with
        `prediction`.
        """


@register
class ScoresLearner(Learner):
    name = SCORES
    sends = "predictions"

    def __init__(self, context: RunContext, parts: Sequence[Part]) -> None:
        super().__init__(context, parts)
        self.workspace = Workspace()

    @classmethod
    def find_requiring_part(cls, parts: Sequence[Part]) -> Part | None:
        return next((part for part in parts if isinstance(part, PredictionPart)), None)

    @property
    def prediction_part(self) -> PredictionPart:
        parts = [part for part in self.parts if isinstance(part, PredictionPart)]
        if len(parts) != 1:
            raise TacitaError("a run that sends scores needs exactly one part that says what is told of them.")
        return parts[0]

    def check(self) -> None:
        train = self.context.train
        backbone = self.context.backbone
        if not isinstance(backbone, Scorer):
            raise TacitaError(f"backbone '{backbone.name}' trains nothing on devices: there are no predictions.")
        check_training(backbone, self.parts, train)
        if train.silos:
            raise TacitaError("train.silos: prediction transfer is for clients that are one user each; leave it at 0.")
        for name in ("aggregator", "aggregation", "denominator", "server_lr"):
            value = getattr(train, name)
            default = TrainConfig.model_fields[name].default
            if value != default:
                raise TacitaError(
                    f"train.{name} = {value!r} is about sums, secure ones among them, and predictions are never summed"
                    ": the server reads every client's own; leave it out."
                )
        if train.objective != "bce":
            raise TacitaError(f"train.objective = '{train.objective}': predictions are probabilities; use 'bce'.")
        if train.optimiser == "pfedme":
            raise TacitaError("train.optimiser = 'pfedme' follows a model that is sent, and here none is; use another.")
        self.prediction_part.check_server()

    @property
    def rounds(self) -> int:
        return self.context.train.rounds

    def questions(self, server: ServerState) -> tuple[str, ...]:
        return (SCORES,)

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        about = "predictions for some items, disguised"
        return (Spec(SCORES, (len(server.items),), seen="each", most=1.0, least=0.0, about=about),)

    def state(self, n_users: int) -> Sequence[StateSpec]:
        backbone = self.context.scorer
        no_rows = np.zeros((0, backbone.item_width), np.float32)
        columns: Arrays = {"row": no_rows}
        heads: Arrays = {}
        for name, head in backbone.init_heads(self.context.draws).items():
            heads[name] = np.repeat(head[None], n_users, axis=0)
        arrays: Arrays = {f"{HEAD}{name}": head for name, head in heads.items()}
        if self.keeps_moments:
            columns |= {"mean": no_rows, "square": no_rows, "steps": np.zeros(0, np.int64)}
            arrays["steps"] = np.zeros(n_users, np.int64)
            arrays |= self._empty_moments(n_users, heads)
        rows = Ragged(np.zeros(n_users + 1, np.int64), np.zeros(0, np.int32), columns)
        return [StateSpec("rows", rows), *(StateSpec(name, array) for name, array in arrays.items())]

    def _empty_moments(self, n_users: int, heads: Arrays) -> Arrays:
        """Adam's moments of private vectors and heads, before the first step."""
        vectors: Arrays = {"private": np.zeros((n_users, self.context.backbone.private_width), np.float32)}
        for name, head in heads.items():
            vectors[f"heads.{name}"] = np.zeros_like(head)
        moments: Arrays = {}
        for name, vector in vectors.items():
            for kind in MOMENT_KINDS:
                moments[f"{name}.{kind}"] = vector.copy()
        return moments

    @property
    def keeps_moments(self) -> bool:
        return self.context.train.moments == "kept"

    @property
    def persistent_names(self) -> frozenset[str]:
        """The clients' models, where the server's is the one that counts.

        A second copy of all rows would double what a run holds, and the best round of the server's model says
        nothing of the clients': they go on learning from where they are.
        """
        if self.prediction_part.evaluates_clients:
            return frozenset()
        own = {f"{PARTS}{SCORES}/{spec.name}" for spec in self.state(0)}
        return frozenset({"private"} | own)

    def count_model_bytes(self, server: ServerState) -> float:
        """Parameters travel before the first round only; what that costs is told apart."""
        return 0.0

    def answer(self, task: CohortTask, question: str) -> CohortReply:
        view = task.view
        local = self._restore_local_models(task)
        stepper = choose_stepper(self.context.scorer, self.context.train, local, alone=True)
        n_steps = int(local.n_steps.max(initial=0))
        stepper.run_steps(0, n_steps, None, StepExtras.empty(view.n_clients))
        predicted = sigmoid(stepper.compute_row_logits())
        own, received = self._collect_predictions(view, local, predicted)
        sent = self.prediction_part.choose_predictions(view, own, received)
        rows = SparseRows(sent.rows(), sent.ids, sent.values["score"].astype(np.float32))
        upload = Upload({SCORES: rows}, np.ones(view.n_clients), view.client_keys)
        return CohortReply(upload, self._collect_state_update(view, local), local.notes)

    def _collect_state_update(self, view: CohortView, local: LocalModels) -> StateUpdate:
        """What devices keep of their models, and what parts keep of them."""
        state: dict[str, AnyArray | Ragged] = {"private": local.private}
        state["took_part"] = np.ones(len(view.user), bool)
        for name, head in local.heads.items():
            state[f"{PARTS}{SCORES}/{HEAD}{name}"] = head
        for name, moment in local.moments.items():
            if not name.startswith("rows."):
                state[f"{PARTS}{SCORES}/{name}"] = moment
        if self.keeps_moments:
            state[f"{PARTS}{SCORES}/steps"] = local.moments["steps"] + local.n_steps
        state[f"{PARTS}{SCORES}/rows"] = _merge_touched_rows(view.lists[SCORES]["rows"], local)
        part_state = {}
        for part in self.watching_parts:
            update = part.after_training(view, local).state
            if update:
                part_state[part.name] = update
        state |= flatten_parts(part_state, PARTS)
        return state

    def _restore_local_models(self, task: CohortTask) -> LocalModels:
        """The clients' own models: what they have moved so far, the common start elsewhere."""
        view = task.view
        run = self.context
        context = run.scorer.list_context_items(view)
        lists = {} if context is None else {CONTEXT: context}
        local = build_local_models(view, lists, run.train, run.draws, self.workspace, task.tasks)
        own_rows = view.lists[SCORES]["rows"]
        entry, is_known = _find_sorted_entries(own_rows, Ragged(local.row_start, local.row_item))
        local.rows[is_known] = own_rows.values["row"][entry]
        local.heads = {name: view.parts[SCORES][f"{HEAD}{name}"].copy() for name in view.heads}
        if self.keeps_moments:
            local.moments = _restore_moments(view, local, entry, is_known)
        return local

    def _collect_predictions(self, view: CohortView, local: LocalModels, predicted: Floats) -> tuple[Ragged, Ragged]:
        """The clients' own samples of the round, and what they were sent, with what their models say now."""
        assert local.n_part_samples is not None
        counts = np.diff(local.user_ptr)
        number = np.arange(len(local.item)) - np.repeat(local.user_ptr[:-1], counts)
        n_own = counts - local.n_part_samples
        is_own = number < np.repeat(n_own, counts)
        client = np.repeat(np.arange(view.n_clients), counts)
        row = local.row_of + local.row_start[client]
        score = predicted[row]

        def select_samples(is_selected: AnyArray) -> Ragged:
            columns: Arrays = {"label": local.label[is_selected], "prediction": score[is_selected]}
            return Ragged.from_pairs(client[is_selected], local.item[is_selected], view.n_clients, columns)

        return select_samples(is_own), select_samples(~is_own)

    def learn_from_total(self, server: ServerState, total: Total, question: str, expected: float) -> ServerState:
        """The part that brings this learner along learns, in its server step."""
        return server


def _restore_moments(view: CohortView, local: LocalModels, entry: AnyArray, is_known: AnyArray) -> Arrays:
    """Adam's moments as devices keep them, of rows that a client has not touched before 0."""
    moments: Arrays = {}
    for name, moment in view.parts[SCORES].items():
        if not name.startswith(HEAD):
            moments[name] = moment.copy()
    own_rows = view.lists[SCORES]["rows"]
    rows: Arrays = {f"rows.{kind}": np.zeros_like(local.rows) for kind in MOMENT_KINDS}
    rows["rows.steps"] = np.zeros(len(local.rows), np.int64)
    for name, column in rows.items():
        own_column = own_rows.values[name.removeprefix("rows.")]
        column[is_known] = own_column[entry]
    return moments | rows


def _compute_entry_keys(lists: Ragged, width: int) -> AnyArray:
    row = lists.rows().astype(np.int64)
    return row * width + lists.ids


def _choose_key_width(first: Ragged, second: Ragged) -> int:
    last_item = max(int(first.ids.max(initial=0)), int(second.ids.max(initial=0)))
    return 1 + last_item


def _find_sorted_entries(lists: Ragged, wanted: Ragged) -> tuple[AnyArray, AnyArray]:
    """Where the wanted entries are in sorted lists, and which of the wanted ones are there."""
    width = _choose_key_width(lists, wanted)
    keys = _compute_entry_keys(lists, width)
    wanted_keys = _compute_entry_keys(wanted, width)
    if not len(keys):
        return np.zeros(0, np.int64), np.zeros(len(wanted_keys), bool)
    place = np.minimum(np.searchsorted(keys, wanted_keys), len(keys) - 1)
    is_known = keys[place] == wanted_keys
    return place[is_known], is_known


def _merge_touched_rows(earlier: Ragged, local: LocalModels) -> Ragged:
    """What clients have touched so far, each list sorted by item, with the rows as they are after training."""
    now = Ragged(local.row_start, local.row_item)
    width = _choose_key_width(earlier, now)
    keys = np.concatenate([_compute_entry_keys(now, width), _compute_entry_keys(earlier, width)])
    merged, first = np.unique(keys, return_index=True)  # the newer one of two
    row_keys = np.arange(len(earlier) + 1, dtype=np.int64) * width
    ptr = np.searchsorted(merged, row_keys)
    trained = {"row": local.rows}
    for name, moment in local.moments.items():
        if name.startswith("rows."):
            trained[name.removeprefix("rows.")] = moment
    columns: Arrays = {}
    for name, column in earlier.values.items():
        both = np.concatenate([trained[name], column])
        columns[name] = both[first]
    items = (merged % width).astype(np.int32)
    return Ragged(ptr.astype(np.int64), items, columns)
