"""retraction: a user who never shared and leaves takes along what their device added to the table (sharing spec D.2).

Sums over a fixed denominator are linear. So a device can keep what it added, damped by what later rounds absorbed of
it: by 1 - alpha beta a round, where beta is the weight of the others. Users who leave send these sums back, and the
server sees only the sum over all who leave together. It knows who took part, a commitment of each upload, and the
length of each upload, which bounds what may come back. All of that names users: live it needs nodes whose owners
allow it (`insecure_single_user_uploads`), until sums are secure.

After one round this is exact. After many it is as good as alpha. `tacita.runs.calibration` finds alpha, and what
remains of the distance to retraining (`ratio`), with users who leave for trial. Without a ratio, or with one above
`most_ratio`, no retraction is accepted: the table goes back to the last checkpoint before these users took part, and
the rounds since then are replayed without them. The same happens where more comes back than was ever sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, CohortView, Doubles, Keys, Ragged, RoundReplay, ServerState, StateUpdate
from tacita.learn.rows import MOST_MOVE
from tacita.messages import CohortReply, DenseArrays, Form, SparseRows, Spec, Total, Upload
from tacita.methods.sharing import retraction_record as record
from tacita.methods.sharing import update_log as log
from tacita.methods.sharing.accumulators import COMMITMENT_SIZE, compute_commitments, find_gaussian_multiplier
from tacita.methods.sharing.carried_rows import CarriedRows, specify_carried_rows
from tacita.privacy.noise import NoiseStream
from tacita.round.broadcast import Audience, PartBroadcast
from tacita.round.capabilities import DeviceQuery, Privacy, RoundPlayer, Unlearning
from tacita.round.fields import ArraySpec, PartFields
from tacita.round.part import Part, PartConfig
from tacita.round.registry import register, register_preset
from tacita.round.request import RequestBatch
from tacita.round.state import Role, StateSpec
from tacita.round.task import LocalTask
from tacita.round.unlearning_report import CalibratedPath, UnlearningReport

_SLACK = 1.001  # of lengths that travelled in single precision


class RetractionConfig(PartConfig):
    alpha: float = Field(0.1, ge=0, le=1, description="how strongly a round damps what was added before it")
    ratio: float | None = Field(
        None, ge=0, description="what calibration found to be left of the distance to retraining; none: not calibrated"
    )
    most_ratio: float = Field(0.5, gt=0, description="above this ratio the table goes back to a checkpoint instead")
    min_users: int = Field(1, ge=1, description="a retraction waits until so many leave together")
    checkpoint_every: int = Field(10, ge=1, description="rounds between two checkpoints of the table")
    most_psi: float = Field(0.0, ge=0, description="how much of who leaves a checkpoint may hold (Psi*)")
    epsilon: float | None = Field(None, gt=0, description="noise for a certificate that holds under assumption")
    delta: float = Field(1e-5, gt=0, lt=1, description="of that noise")


@register
class Retraction(Part, Privacy, Unlearning):
    name = "retraction"
    scope = ("people",)
    replays_rounds = True
    observes_only = True
    addresses_clients = True  # it writes nothing to them; the server records who takes part
    Config: ClassVar[type[PartConfig]] = RetractionConfig
    config: RetractionConfig

    def fields(self, n_items: int, block: int = 0) -> PartFields:
        train = self.context.train
        size = n_items * self.context.backbone.item_width
        max_weight = log.bound_client_weight(self.context, n_items)
        longest = train.server_lr * max_weight * MOST_MOVE
        longest = longest * size**0.5
        largest = 2.0**16 - 1
        psi = Spec("psi", (1,), seen="each", most=longest, least=0.0, about="how long what was sent is")
        about = "a digest of what was sent"
        commitment = Spec("commitment", (COMMITMENT_SIZE,), seen="each", most=largest, least=0.0, about=about)
        damping = ArraySpec((4,), np.float64)
        extra = (psi, commitment)
        return PartFields(extra=extra, common={"damping": damping}, requires_all=True)

    def check(self, n_items: int) -> None:
        train = self.context.train
        if train.aggregation != "fixed":
            raise TacitaError(
                f"part 'retraction' takes back summands, and train.aggregation = '{train.aggregation}' divides by who "
                "is there; use 'fixed'."
            )
        if train.participation.kind == "poisson":
            log.check_replay_settings(self.name, train)
        any_denominator = train.model_copy(update={"denominator": 1.0})
        log.check_replay_settings(self.name, any_denominator)
        log.check_part_order(self.name, self.context, ("encode", "after"), ("server_step", "after"))

    # on the device

    def state(self, n_users: int) -> Sequence[StateSpec]:
        backbone = self.context.backbone
        carried_rows = specify_carried_rows(n_users, backbone.item_width, backbone.private_width)
        return [*carried_rows, StateSpec("waiting", role=Role.WAITING)]

    def prepare(self, view: CohortView) -> LocalTask:
        """Keep the private vector as it was before the first round after a checkpoint, to be able to go back."""
        device = CarriedRows(view, self.name)
        return LocalTask(state=device.record_vectors())

    def encode(self, view: CohortView, upload: Upload) -> tuple[Upload, StateUpdate]:
        """Add what leaves to what is carried: this part stands after those that change uploads."""
        if "rows" not in upload.values:
            return upload, {}
        device = CarriedRows(view, self.name)
        rows = log.to_sparse_rows(upload.values["rows"])
        denominator = max(device.damping.denominator, 1e-300)
        scaled_weight = self.context.train.server_lr * upload.weight
        share = scaled_weight / denominator
        update = device.carry_upload(upload, rows, share, self.config.alpha)
        squares = rows.squared_norms(upload.n_clients)
        lengths = share * np.sqrt(squares)
        psi = DenseArrays(lengths.astype(np.float32)[:, None])
        secret = self.context.draws.private("commitment", view.block, view.round)
        digest = compute_commitments(rows, upload.n_clients, view.client_keys, secret)
        commitment = DenseArrays(digest.astype(np.float32))
        upload = upload.with_value(f"{self.name}.psi", psi)
        upload = upload.with_value(f"{self.name}.commitment", commitment)
        return upload, update

    def answer_question(self, view: CohortView, question: str) -> CohortReply:
        device = CarriedRows(view, self.name)
        kind, *options = question.split("-")
        values: dict[str, Form] = {}
        if kind == "back":  # the rounds after the checkpoint are going to be replayed
            rounds = int(options[0])
            update = device.return_to_round(rounds)
        else:
            newcomers = self.context.backbone.init_private(self.context.draws, view.user_keys)
            update = device.forget_everything(newcomers)
            if kind != "gone":
                values = _build_carried_fields(device)
        weight = np.ones(view.n_clients)
        upload = Upload(values, weight, view.client_keys)
        return CohortReply(upload, update)

    # on the server

    def question_fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        if question != "leave":
            return ()
        about = "what those who leave take back"
        shape = server.items.shape
        carried = Spec("carried", shape, most=MOST_MOVE, about=about)
        size = Spec("bytes", (1,), least=0.0)
        return (carried, size)

    def server_block_start(self, server: ServerState) -> Arrays:
        state = server.parts.get(self.name)
        if not state:
            state = record.make_empty_record()
        return state | record.make_checkpoint(state, server)

    def broadcast(self, server: ServerState, audience: Audience) -> PartBroadcast:
        """The damping of all rounds so far and of this one; in a round, the server records who takes part."""
        clients = audience.clients
        if audience.occasion != "round" or clients is None:
            return PartBroadcast({"damping": self._compute_damping(server)})
        moment = (server.block, server.round)
        state = server.parts[self.name]
        state = log.record_participants(state, moment, clients)
        server = server.with_part(self.name, state)
        nothing = Ragged.empty(len(clients))
        damping = self._compute_damping(server)
        return PartBroadcast({"damping": damping}, nothing, server)

    def _compute_damping(self, server: ServerState) -> Doubles:
        """The logarithms of the damping so far and of this round, its denominator, and the segment it is in."""
        state = server.parts.get(self.name, {})
        if not state:
            return np.zeros(4)
        n_clients = 0
        if len(state["rounds"]):
            cohort_sizes = np.diff(state["ptr"])
            n_clients = int(cohort_sizes[-1])
        cohort_size = float(max(1, n_clients))
        denominator = self.context.train.denominator or cohort_size
        so_far = state["damping"][-1]
        step = self._compute_log_damping(state, n_clients, denominator)
        checkpoints = record.list_checkpoints(state)
        segment = float(max(checkpoints))
        return np.array([so_far, step, denominator, segment])

    def _compute_log_damping(self, state: Arrays, n_clients: int, denominator: float) -> float:
        """The logarithm of what remains of an earlier addition after a round of so many."""
        mean_weight = float(state["mean-weight"][0])
        weight = mean_weight or 1.0
        server_lr = self.context.train.server_lr
        expected = server_lr * weight * n_clients
        others = expected / denominator
        absorbed = self.config.alpha * others
        remains = 1 - absorbed
        return float(np.log(max(1e-3, remains)))

    def server_step(self, before: ServerState, server: ServerState, total: Total) -> ServerState:
        old_state = server.parts[self.name]
        state = dict(old_state)
        step = self._compute_damping(server)[1]
        damping = state["damping"]
        number = len(damping) - 1
        total_damping = damping[-1] + step
        state["damping"] = np.append(damping, total_damping)
        state = record.record_uploads(state, number, total, self.name)
        if (number + 1) % self.config.checkpoint_every == 0:
            state |= record.make_checkpoint(state, server)
        return server.with_part(self.name, state)

    # leaving

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        if requests.kind != "leave":
            _refuse_single_items(requests)
            return None
        old_state = server.parts[self.name]
        state = dict(old_state)
        earlier = state["waiting"]
        waiting = np.union1d(earlier, requests.senders)
        n_waiting = len(waiting)
        missing = self.config.min_users - n_waiting
        if missing > 0 and not requests.is_immediate:
            state["waiting"] = waiting
            report = log.build_unlearning_report(self.name, state, waits_for=missing, subjects=_list_keys(waiting))
            updated = server.with_part(self.name, state)
            return updated, report
        state["waiting"] = np.zeros(0, np.uint64)
        server = server.with_part(self.name, state)
        took_part = np.isin(waiting, state["sender"])
        if not took_part.any():
            report = log.build_unlearning_report(self.name, state, subjects=_list_keys(waiting))
            return server, report
        reason = self._find_refusal_reason()
        if reason is None:
            outcome = self._apply_retraction(server, waiting, ask)
            if outcome is not None:
                return outcome
            reason = "what came back is longer than all that was ever sent"
        return self._roll_back_and_replay(server, waiting, reason, ask, play)

    def _find_refusal_reason(self) -> str | None:
        """Why no retraction is accepted; None: calibration allows it."""
        ratio = self.config.ratio
        most = self.config.most_ratio
        if ratio is None:
            return "alpha was not calibrated"
        if ratio > most:
            return f"calibration left {ratio:.2f} of the distance, above {most:g}"
        return None

    def _apply_retraction(
        self, server: ServerState, leavers: Keys, ask: DeviceQuery
    ) -> tuple[ServerState, UnlearningReport] | None:
        """Add what the leavers carried; None: it is longer than it can be."""
        state = server.parts[self.name]
        total = ask(server, "leave", leavers)
        bound = record.sum_upload_lengths(state, leavers)
        norm = np.linalg.norm(total["carried"])
        length = float(norm)
        if length > bound * _SLACK:
            return None
        items = server.items + total["carried"]
        sigma = self._compute_sigma(bound)
        if self.config.epsilon is not None:
            noise = self._open_noise_stream(server, leavers).draw_normals(*items.shape)
            items = items + sigma * noise
        rounded = np.asarray(items, np.float32)
        server = server.with_items(rounded)
        state = record.drop_leavers(state, leavers, server)
        guarantee = self._describe_guarantee() if sigma else {}
        report = log.build_unlearning_report(
            self.name,
            state,
            calibration=CalibratedPath(path="retraction", alpha=self.config.alpha, ratio=self.config.ratio),
            details={"leavers": len(leavers), "length": length, "sigma": sigma},
            subjects=_list_keys(leavers),
            psi_bound=bound,
            storage_client=float(total["bytes"][0]) / total.n_clients,
            purged=["checkpoints that hold them", "their participation, commitments and lengths"],
            **guarantee,
        )
        updated = server.with_part(self.name, state)
        return updated, report

    def _compute_sigma(self, bound: float) -> float:
        """The noise on a retraction; 0: none is set."""
        config = self.config
        if config.epsilon is None:
            return 0.0
        ratio = config.ratio or 0.0
        multiplier = find_gaussian_multiplier(config.epsilon, config.delta)
        return ratio * bound * multiplier

    def _describe_guarantee(self) -> dict[str, Any]:
        return {
            "epsilon": self.config.epsilon,
            "delta": self.config.delta,
            "guarantee": "bounded",
            "assumptions": [
                "what is left is at most the calibrated share of what was sent",
                self._describe_noise_source(),
            ],
        }

    def _describe_noise_source(self) -> str:
        if self.context.draws.is_secret:
            return "the noise followed a secret that nobody has any more"
        return "nobody has the run's seed, which the noise follows"

    @property
    def needs_secret_noise(self) -> bool:
        """Where a retraction has noise: whoever has the settings would take off what follows the seed."""
        return self.config.epsilon is not None

    def _open_noise_stream(self, server: ServerState, leavers: Keys) -> NoiseStream:
        """Fresh for every retraction: two with the same noise, subtracted, would show what was carried."""
        ordered = np.sort(leavers)
        leaver_keys = [int(key) for key in ordered]
        return NoiseStream(self.context.draws, "retraction", server.block, server.round, *leaver_keys)

    def _roll_back_and_replay(
        self, server: ServerState, leavers: Keys, reason: str, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport]:
        """The last checkpoint that holds little enough of the leavers, and the rounds since then without them."""
        state = server.parts[self.name]
        most = self.config.most_psi
        checkpoint = record.find_checkpoint(state, leavers, most)
        rounds = list(log.iterate_rounds(state))
        if checkpoint is None or record.has_rounds_of_other_blocks(state, checkpoint, server.block):
            raise TacitaError(
                "part 'retraction' cannot go back to before these people took part, in an earlier block; in a run "
                "folder forget with --again."
            )
        truncated = record.truncate_and_drop_leavers(state, leavers, checkpoint)
        server = record.restore_checkpoint(server, state, checkpoint)
        server = server.with_part(self.name, truncated)
        is_leaver = np.isin(state["clients"], leavers)
        remaining_clients = state["clients"][~is_leaver]
        remaining = np.unique(remaining_clients)
        ask(server, "gone", leavers)
        if len(remaining):
            ask(server, f"back-{checkpoint}", remaining)
        for (_, number), clients in rounds[checkpoint:]:
            has_left = np.isin(clients, leavers)
            others = clients[~has_left]
            if len(others):
                server = play(server, others, RoundReplay(number))
        report = log.build_unlearning_report(
            self.name,
            server.parts[self.name],
            calibration=CalibratedPath(
                path="checkpoint", alpha=self.config.alpha, ratio=self.config.ratio, reason=reason
            ),
            details={"from_round": checkpoint, "leavers": len(leavers)},
            subjects=_list_keys(leavers),
            purged=["later checkpoints", "their participation, commitments and lengths"],
        )
        return server, report


def _list_keys(users: Keys) -> tuple[int, ...]:
    return tuple(users.tolist())


def _refuse_single_items(requests: RequestBatch) -> None:
    """Only whole users can be taken back."""
    if requests.kind == "forget" and log.asks_to_forget(requests):
        raise TacitaError(
            "part 'retraction' lets whole people leave and does not forget single items; train with part 'fru' "
            "for that, or in a run folder forget with --again."
        )


def _build_carried_fields(device: CarriedRows) -> dict[str, Form]:
    """What leavers send back, and how many bytes they carried."""
    carried = device.rows
    owner = carried.rows()
    damped = device.damp_rows(carried)
    numbers_in_row = 2 + damped.shape[1]
    n_rows = carried.counts()[:, None]
    size = 4.0 * n_rows * numbers_in_row
    rows = SparseRows(owner, carried.ids, damped)
    return {"carried": rows, "bytes": DenseArrays(size)}


register_preset(
    "retraction", {"name": "withdrawal"}, {"name": "retraction"}, settings={"train": {"aggregation": "fixed"}}
)
