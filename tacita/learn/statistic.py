"""statistic: each client contributes once a block, to a sum; the model turns the sum into what it scores with.

A device remembers what it contributed in every block. Who wants to be forgotten marks it. When the server asks, those
who asked send, in one sum, what they take back and what they contribute instead; only then is it gone from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, Bools, CohortView, Keys, Ragged, ServerState, StateUpdate
from tacita.messages import CohortReply, Spec, Total, Upload, count_wire_bytes
from tacita.models.statistic_model import StatisticModel
from tacita.privacy.ledger import ACCOUNT_ARRAYS, NO_LIMIT, Ledger
from tacita.round.capabilities import DeviceQuery, RoundPlayer, Unlearning
from tacita.round.device_state import PARTS
from tacita.round.learner import Learner, register
from tacita.round.part import implements
from tacita.round.question import Question
from tacita.round.request import UNLEARNING_KINDS, RequestBatch
from tacita.round.state import Role, StateSpec
from tacita.round.task import CohortTask
from tacita.round.unlearning_report import UnlearningReport

STATISTIC = "statistic"  # the question whose answer is contributed for good
RETRACTION_KIND = "retraction"  # the learner's own question to those who withdraw
RETRACTION = f"{STATISTIC}/{RETRACTION_KIND}"
CONTRIBUTION_LOG = "told"  # on devices: what was contributed
PENDING_USERS = "asked"  # on the server: who waits to take something back


@register
class StatisticLearner(Learner, Unlearning):
    """Passes the questions of a round on to a model that learns from sums."""

    name = "statistic"
    model_after = True
    tries = True

    @property
    def model(self) -> StatisticModel:
        model = self.context.backbone
        assert isinstance(model, StatisticModel)
        return model

    @property
    def unlearning(self) -> Unlearning | None:
        return self

    def check(self) -> None:
        train = self.context.train
        name = self.context.backbone.name
        if train.participation.kind != "all":
            raise TacitaError(f"backbone '{name}' asks everybody once a block; use train.participation.kind = 'all'.")
        if train.stepper == "fused":
            raise TacitaError(
                f"there is no fused step for backbone '{name}': it trains nothing; use train.stepper = 'auto'."
            )
        for part in self.parts:
            if implements(part, "after_training"):
                raise TacitaError(
                    f"part '{part.name}' looks at local training; backbone '{name}' has none: leave it out."
                )
            changes_uploads = implements(part, "weigh") or implements(part, "encode")
            if self.ledger() and changes_uploads:
                raise TacitaError(
                    f"part '{part.name}' changes what is told, so privacy.epsilon would count something else than what "
                    "leaves; leave one of the two out."
                )

    @property
    def rounds(self) -> int:
        return self.model.n_validation_candidates

    def questions(self, server: ServerState) -> tuple[str, ...]:
        return self.model.questions(server) if server.round == 0 else ()

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        return self.model.list_statistic_fields(server, question)

    def answer(self, task: CohortTask, question: str) -> CohortReply:
        view = task.view
        ledger = self.ledger()
        if ledger is None:
            return self._answer_statistic(view, question)
        release, loss = self.model.price_release(view.heads, question)
        account, goes = ledger.charge(self._read_account(view), release, loss, view.train.counts() > 0)
        # who cannot pay contributes nothing: an empty history adds 0 to every sum
        view = replace(view, train=view.train.filter_entries(goes[view.train.rows()]))
        return self._with_account(view, self._answer_statistic(view, question), account, goes)

    def _answer_statistic(self, view: CohortView, question: str) -> CohortReply:
        log = view.lists[self.name][CONTRIBUTION_LOG]
        view = replace(view, history=Ragged(log.ptr, log.ids))  # a retraction is made of the same lists
        statistic = self.model.encode_statistic(view, question)
        upload = Upload(statistic, np.ones(view.n_clients), view.client_keys)
        if question != STATISTIC:
            return CohortReply(upload)
        n_new = len(view.train.ids)
        columns = {"block": np.full(n_new, view.block, np.int32), "stays": np.ones(n_new, bool)}
        log = log.join_rows(Ragged(view.train.ptr, view.train.ids, columns))
        return CohortReply(upload, {f"{PARTS}{self.name}/{CONTRIBUTION_LOG}": log})

    # a budget

    def ledger(self) -> Ledger | None:
        return self.model.ledger()

    def _read_account(self, view: CohortView) -> Arrays:
        return {name: view.parts[self.name][name] for name in ACCOUNT_ARRAYS}

    def _with_account(self, view: CohortView, reply: CohortReply, account: Arrays, goes: Bools) -> CohortReply:
        """The reply, and what devices have left after it."""
        contributes = reply.contributes
        if contributes is None:
            contributes = _find_clients(view, goes)
        state = {f"{PARTS}{self.name}/{name}": value for name, value in account.items()}
        return replace(reply, state_update={**reply.state_update, **state}, contributes=contributes)

    def charge_retraction(self, heads: Arrays, account: Arrays, who: Bools) -> tuple[Arrays, Bools]:
        """Accounts once these users took something back: never refused, so it may cost more than was planned."""
        ledger = self.ledger()
        assert ledger is not None
        release, loss = self.model.price_release(heads, RETRACTION)
        no_limit = {**account, "budget": np.full_like(account["budget"], NO_LIMIT)}
        charged, goes = ledger.charge(no_limit, release, loss, who)
        return {**charged, "budget": account["budget"]}, goes

    def noise_sum(self, server: ServerState, total: Total, question: Question) -> Total:
        return self.model.add_noise(server, total, str(question), self.context.draws)

    def promises(self, server: ServerState) -> dict[str, float]:
        return self.model.promises(server)

    def learn_from_total(self, server: ServerState, total: Total, question: str, expected: float) -> ServerState:
        return self.model.learn_from_sums(server, total, question)

    def continue_without_question(self, server: ServerState) -> ServerState:
        return self.model.with_next_trial(server)

    # state

    @property
    def persistent_names(self) -> frozenset[str]:
        return frozenset(f"{PARTS}{self.name}/{spec.name}" for spec in self.state(0))

    def state(self, n_users: int) -> Sequence[StateSpec]:
        columns: Arrays = {"block": np.zeros(0, np.int32), "stays": np.zeros(0, bool)}
        log = replace(Ragged.empty(n_users), values=columns)
        specs = [
            StateSpec(CONTRIBUTION_LOG, log, Role.REPORTED, persistent=True),
            StateSpec(PENDING_USERS, role=Role.WAITING),
        ]
        ledger = self.ledger()
        if ledger is not None:
            accounts = ledger.open_accounts(n_users, self.model.epsilon)
            specs += [StateSpec(name, array, Role.ACCOUNT, persistent=True) for name, array in accounts.items()]
        return specs

    # retractions

    def on_device(self, view: CohortView, requests: RequestBatch) -> StateUpdate:
        if requests.kind not in UNLEARNING_KINDS:
            return {}
        log = view.lists[self.name][CONTRIBUTION_LOG]
        stays = log.values["stays"] & ~requests.items.holds(log.rows(), log.ids)
        if requests.kind == "leave":
            stays = np.zeros(len(log.ids), bool)
        return {CONTRIBUTION_LOG: replace(log, values={**log.values, "stays": stays})}

    def on_server(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, UnlearningReport] | None:
        """Ask for the retractions of all who wait, once they are enough; in a sum, nobody's own shows."""
        if requests.kind not in UNLEARNING_KINDS:
            return None
        self._check_retractable()
        waiting = server.parts.get(self.name, {}).get(PENDING_USERS, np.zeros(0, np.uint64))
        subjects = np.union1d(waiting, requests.senders)
        method = self.context.backbone.name
        report = UnlearningReport(method=method, exact=False, subjects=tuple(subjects.tolist()))
        quorum = self.model.retraction_quorum
        if len(subjects) < quorum and not requests.is_immediate:
            wait = UnlearningReport(mode=f"waits until {quorum} users have asked", waits=True)
            return self._with_pending_users(server, subjects), wait.with_defaults(report)
        change = ask(server, RETRACTION_KIND, subjects).sums
        if not any(value.any() for value in change.values()):
            idle = UnlearningReport(mode="none: the server was told of none of it")
            server = self._with_pending_users(server, subjects[:0]) if len(waiting) else server
            return server, idle.with_defaults(report)
        changed, rank = self.model.apply_retraction(server, change)
        changed = self._with_pending_users(changed, subjects[:0])
        caveats = self.model.describe_retraction()
        if caveats is not None:
            limits = UnlearningReport(assumptions=caveats.assumptions, residual_risk=caveats.residual_risk)
            report = limits.with_defaults(report)
        return changed, _report_retraction(changed, rank).with_defaults(report)

    def _with_pending_users(self, server: ServerState, users: Keys) -> ServerState:
        return server.with_part(self.name, {PENDING_USERS: users})

    def question_fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        return self.model.list_retraction_fields(server)

    def answer_question(self, view: CohortView, question: str) -> CohortReply:
        """What users contributed before they withdrew some of it, and what remains; the device keeps the rest."""
        log = view.lists[self.name][CONTRIBUTION_LOG]
        remaining = log.filter_entries(log.values["stays"])
        before = split_log_by_block(log)
        after = split_log_by_block(remaining)
        after += [Ragged.empty(len(log))] * (len(before) - len(after))
        change = self.model.encode_retraction(view, before, after)
        upload = Upload(change, np.ones(view.n_clients), view.client_keys)
        contributes = _find_clients(view, log.counts() > remaining.counts())
        state = {f"{PARTS}{self.name}/{CONTRIBUTION_LOG}": remaining}
        reply = CohortReply(upload, state, contributes=contributes)
        if self.ledger() is None:
            return reply
        account, goes = self.charge_retraction(view.heads, self._read_account(view), log.counts() > 0)
        return self._with_account(view, reply, account, goes)

    def _check_retractable(self) -> None:
        for part in self.parts:
            if implements(part, "weigh") or implements(part, "encode"):
                raise TacitaError(
                    f"part '{part.name}' changes what is told before it is summed, so it cannot be taken back; train "
                    "again without the data."
                )


def _report_retraction(server: ServerState, rank: int) -> UnlearningReport:
    """What a retraction did."""
    bytes_down = sum(count_wire_bytes(head) for head in server.heads.values())
    storage = sum(array.nbytes for arrays in server.parts.values() for array in arrays.values())
    return UnlearningReport(
        mode="the model is corrected in place" if rank else "the model is solved anew from its sums",
        rounds=1,
        bytes_down=float(bytes_down),
        storage_server=float(storage),
        purged=("told", "sums", "inverse", "weights"),
    )


def _find_clients(view: CohortView, users: Bools) -> Bools:
    """The clients on which one of these users lives."""
    client = np.repeat(np.arange(view.n_clients), np.diff(view.user_ptr))
    return np.bincount(client, weights=users, minlength=view.n_clients) > 0


def split_log_by_block(log: Ragged) -> list[Ragged]:
    """What was contributed in each block, from a log of all of them."""
    block = log.values["block"] if len(log.ids) else np.zeros(0, np.int32)
    items = Ragged(log.ptr, log.ids)
    return [items.filter_entries(block == index) for index in range(int(block.max(initial=-1)) + 1)]
