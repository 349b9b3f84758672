"""statistic: each client tells once a block, in a sum; the model turns the sum into what it scores with.

A device remembers what it told in every block. Who wants to be forgotten marks it, and when the server asks, those
who asked send, in one sum, what they take back and what they say again; only then is it gone from the device, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, Bools, CohortView, Ragged, ServerState, StateUpdate
from tacita.messages import CohortReply, Spec, Total, Upload, wire_bytes
from tacita.models.base import RetractableModel
from tacita.privacy.ledger import ACCOUNT_ARRAYS, NO_LIMIT, Ledger
from tacita.round.device_state import PARTS
from tacita.round.learner import Learner, collect_extra_fields, register
from tacita.round.parts import DeviceQuery, RoundPlayer, overrides
from tacita.round.request import RequestBatch

STATISTIC = "statistic"  # the question whose answer is told for good
RETRACTION = "statistic/retraction"  # the question that those who withdraw answer
CONTRIBUTION_LOG, PENDING_USERS = (
    "told",
    "asked",
)  # on devices: what was told; on the server: who waits to take something back
WITHDRAWAL_KINDS = ("forget", "leave")


@register
class StatisticLearner(Learner):
    """Passes the questions of a round on to a model that learns from sums."""

    name = "statistic"
    model_after = True
    tries = True

    def check(self) -> None:
        train, backbone = self.context.train, self.context.backbone
        if train.participation.kind != "all":
            raise TacitaError(
                f"backbone '{backbone.name}' asks everybody once a block; use train.participation.kind = 'all'."
            )
        if train.stepper == "fused":
            raise TacitaError(
                f"there is no fused step for backbone '{backbone.name}': it trains nothing; use train.stepper = 'auto'."
            )

        for part in self.parts:
            if overrides(part, "extras") or overrides(part, "after_training"):
                raise TacitaError(
                    f"part '{part.name}' looks at local training; backbone '{backbone.name}' has none: leave it out."
                )
            if self.ledger() and (overrides(part, "weight") or overrides(part, "encode")):
                raise TacitaError(
                    f"part '{part.name}' changes what is told, so privacy.epsilon would count something else than what "
                    "leaves; leave one of the two out."
                )

    @property
    def rounds(self) -> int:
        return self.context.backbone.trials

    def questions(self, server: ServerState) -> tuple[str, ...]:
        return self.context.backbone.questions(server) if server.round == 0 else ()

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        if self._is_retraction(question):
            return self.model.retraction_fields(server)
        extras = collect_extra_fields(self.parts, len(server.items))
        return (*self.context.backbone.statistic_fields(server, question), *extras)

    def answer(self, view: CohortView, question: str) -> CohortReply:
        if self.ledger() is None:
            return self._build_answer(view, question)
        account, goes = self._charge(view, question)
        if not self._is_retraction(
            question
        ):  # who may not go has nothing to tell: an empty history adds 0 to every sum
            view = replace(view, train=view.train.filter_entries(goes[view.train.rows()]))
        answer = self._build_answer(view, question)
        says = _find_clients(view, goes) if answer.contributes is None else answer.contributes
        kept = {f"{PARTS}{self.name}/{name}": value for name, value in account.items()}
        return replace(answer, state_update={**answer.state_update, **kept}, contributes=says)

    def _build_answer(self, view: CohortView, question: str) -> CohortReply:
        if self._is_retraction(question):
            return self._answer_retraction(view)
        if self.takes_back:  # what it told before, to the word: what is taken back is made of the same lists
            before = view.lists[self.name][CONTRIBUTION_LOG]
            view = replace(view, history=Ragged(before.ptr, before.ids))
        told = self.context.backbone.tell(view, question)
        upload = Upload(told, np.ones(view.n_clients), view.client_keys)
        if not self.takes_back or question != STATISTIC:
            return CohortReply(upload)
        size = len(view.train.ids)
        new = {"block": np.full(size, view.block, np.int32), "stays": np.ones(size, bool)}
        log = view.lists[self.name][CONTRIBUTION_LOG].join_rows(Ragged(view.train.ptr, view.train.ids, new))
        return CohortReply(upload, {f"{PARTS}{self.name}/{CONTRIBUTION_LOG}": log})

    # a budget

    def ledger(self) -> Ledger | None:
        return self.context.backbone.ledger()

    def _charge(self, view: CohortView, question: str) -> tuple[Arrays, Bools]:
        """What devices have left after an answer, and whose budget holds it; who has nothing to tell pays nothing."""
        ledger, account = self.ledger(), {name: view.parts[self.name][name] for name in ACCOUNT_ARRAYS}
        assert ledger is not None
        if self._is_retraction(question):
            return self.charge_retraction(view.heads, account, view.lists[self.name][CONTRIBUTION_LOG].counts() > 0)
        what, mu = self.context.backbone.loss(view.heads, question)
        return ledger.charge(account, what, mu, view.train.counts() > 0)

    def charge_retraction(self, heads: Arrays, account: Arrays, who: Bools) -> tuple[Arrays, Bools]:
        """Accounts once these people took something back: never refused, so it may cost more than was planned."""
        ledger = self.ledger()
        assert ledger is not None
        what, mu = self.context.backbone.loss(heads, RETRACTION)
        endless = {**account, "budget": np.full_like(account["budget"], NO_LIMIT)}
        charged, goes = ledger.charge(endless, what, mu, who)
        return {**charged, "budget": account["budget"]}, goes

    def noised(self, server: ServerState, total: Total, question: str) -> Total:
        return self.context.backbone.noised(server, total, question, self.context.draws)

    def promises(self, server: ServerState) -> dict[str, float]:
        return self.context.backbone.promises(server)

    def learn(self, server: ServerState, total: Total, question: str, expected: float) -> ServerState:
        return self.context.backbone.learn(server, total, question)

    def go_on(self, server: ServerState) -> ServerState:
        return self.context.backbone.try_next(server)

    # taking back

    @property
    def model(self) -> RetractableModel:
        model = self.context.backbone.retracts
        assert model is not None
        return model

    @property
    def takes_back(self) -> bool:
        return self.context.backbone.retracts is not None

    @property
    def lasting(self) -> frozenset[str]:
        kept = ((CONTRIBUTION_LOG,) if self.takes_back else ()) + (ACCOUNT_ARRAYS if self.ledger() else ())
        return frozenset(f"{PARTS}{self.name}/{one}" for one in kept)

    def device_arrays(self, n_users: int) -> StateUpdate:
        kinds: Arrays = {"block": np.zeros(0, np.int32), "stays": np.zeros(0, bool)}
        told = {CONTRIBUTION_LOG: replace(Ragged.empty(n_users), values=kinds)} if self.takes_back else {}
        ledger = self.ledger()
        return {**told, **(ledger.open_accounts(n_users, self.context.backbone.epsilon) if ledger else {})}

    def handle_many_here(self, view: CohortView, requests: RequestBatch) -> StateUpdate:
        if not self.takes_back or requests.kind not in WITHDRAWAL_KINDS:
            return {}
        log = view.lists[self.name][CONTRIBUTION_LOG]
        stays = log.values["stays"] & ~requests.items.holds(log.rows(), log.ids)
        if requests.kind == "leave":
            stays = np.zeros(len(log.ids), bool)
        return {CONTRIBUTION_LOG: replace(log, values={**log.values, "stays": stays})}

    def handle_many(
        self, server: ServerState, requests: RequestBatch, ask: DeviceQuery, play: RoundPlayer
    ) -> tuple[ServerState, dict[str, Any]] | None:
        """Ask for the retractions of all who wait, once they are enough; in a sum, nobody's own can be told."""
        if not self.takes_back or requests.kind not in WITHDRAWAL_KINDS:
            return None
        self._check_retractable()
        waiting = server.parts.get(self.name, {}).get(PENDING_USERS, np.zeros(0, np.uint64))
        asked = np.union1d(waiting, requests.senders)
        said = {"method": self.context.backbone.name, "exact": False, "subjects": asked}
        if len(asked) < self.model.retraction_quorum and not requests.is_immediate:
            mode = f"waits until {self.model.retraction_quorum} users have asked"
            return server.with_part(self.name, {PENDING_USERS: asked}), said | {"mode": mode, "waits": True}
        change = ask(server, RETRACTION, asked).sums
        if not any(value.any() for value in change.values()):
            mode = "none: the server was told of none of it"
            return (server.with_part(self.name, {PENDING_USERS: asked[:0]}) if len(waiting) else server), said | {
                "mode": mode
            }
        after, rank = self.model.apply_retraction(server, change)
        said |= self.model.describe_retraction()
        return after.with_part(self.name, {PENDING_USERS: asked[:0]}), said | {
            "mode": f"update of rank {rank}" if rank else "new solve",
            "rounds": 1,
            "bytes_down": float(sum(wire_bytes(a) for a in after.heads.values())),
            "purged": ["told", "sums", "inverse", "weights"],
            "storage_server": float(sum(a.nbytes for part in after.parts.values() for a in part.values())),
        }

    def _is_retraction(self, question: str) -> bool:
        return question.startswith(f"{self.name}/")

    def _answer_retraction(self, view: CohortView) -> CohortReply:
        """What people told before they withdrew some of it, and what is left; the device remembers what is left."""
        log = view.lists[self.name][CONTRIBUTION_LOG]
        left = log.filter_entries(log.values["stays"])
        told, still = split_by_block(log), split_by_block(left)
        still += [Ragged.empty(len(log))] * (len(told) - len(still))
        change = self.model.encode_retraction(view, told, still)
        upload = Upload(change, np.ones(view.n_clients), view.client_keys)
        says = _find_clients(view, log.counts() > left.counts())
        return CohortReply(upload, {f"{PARTS}{self.name}/{CONTRIBUTION_LOG}": left}, contributes=says)

    def _check_retractable(self) -> None:
        for part in self.parts:
            if overrides(part, "weight") or overrides(part, "encode"):
                raise TacitaError(
                    f"part '{part.name}' changes what is told before it is summed, so it cannot be taken back; train "
                    "again without the data."
                )


def _find_clients(view: CohortView, users: Bools) -> Bools:
    """The clients on which one of these users lives."""
    client = np.repeat(np.arange(view.n_clients), np.diff(view.user_ptr))
    return np.bincount(client, weights=users, minlength=view.n_clients) > 0


def split_by_block(log: Ragged) -> list[Ragged]:
    """What was told in each block, from a log of all of them."""
    block = log.values["block"] if len(log.ids) else np.zeros(0, np.int32)
    plain = Ragged(log.ptr, log.ids)
    return [plain.filter_entries(block == b) for b in range(int(block.max(initial=-1)) + 1)]
