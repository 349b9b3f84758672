"""statistic: each client tells once a block, in a sum; the model turns the sum into what it scores with.

A device remembers what it told in every block. Who wants to be forgotten marks it, and when the server asks, those
who asked send, in one sum, what they take back and what they say again; only then is it gone from the device, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tacita.core.errors import TacitaError
from tacita.core.types import Arrays, Bools, CohortView, Held, Ragged, Requests, ServerState
from tacita.fields import Answer, Spec, Total, Upload, wire_bytes
from tacita.models.base import Retracts
from tacita.privacy.ledger import ACCOUNT, NO_LIMIT, Ledger
from tacita.round.device_state import PARTS
from tacita.round.learner import Learner, extra_fields, register
from tacita.round.parts import Ask, Play, overrides

STATISTIC = "statistic"  # the question whose answer is told for good
RETRACTION = "statistic/retraction"  # the question that those who withdraw answer
TOLD, ASKED = "told", "asked"  # on devices: what was told; on the server: who waits to take something back
WITHDRAW = ("forget", "leave")


@register
class StatisticLearner(Learner):
    """Passes the questions of a round on to a model that learns from sums."""

    name = "statistic"
    model_after = True
    tries = True

    def check(self) -> None:
        train, backbone = self.world.train, self.world.backbone
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
        return self.world.backbone.trials

    def questions(self, server: ServerState) -> tuple[str, ...]:
        return self.world.backbone.questions(server) if server.round == 0 else ()

    def fields(self, server: ServerState, question: str) -> tuple[Spec, ...]:
        if self._retracts(question):
            return self.model.retraction_fields(server)
        extras = extra_fields(self.parts, len(server.items))
        return (*self.world.backbone.statistic_fields(server, question), *extras)

    def answer(self, view: CohortView, question: str) -> Answer:
        if self.ledger() is None:
            return self._answer(view, question)
        account, goes = self._charged(view, question)
        if not self._retracts(question):  # who may not go has nothing to tell: an empty history adds 0 to every sum
            view = replace(view, train=view.train.where(goes[view.train.rows()]))
        answer = self._answer(view, question)
        says = _some(view, goes) if answer.says is None else answer.says
        kept = {f"{PARTS}{self.name}/{name}": value for name, value in account.items()}
        return replace(answer, kept={**answer.kept, **kept}, says=says)

    def _answer(self, view: CohortView, question: str) -> Answer:
        if self._retracts(question):
            return self._take_back(view)
        if self.takes_back:  # what it told before, to the word: what is taken back is made of the same lists
            before = view.lists[self.name][TOLD]
            view = replace(view, history=Ragged(before.ptr, before.ids))
        told = self.world.backbone.tell(view, question)
        upload = Upload(told, np.ones(view.n_clients), view.client_keys)
        if not self.takes_back or question != STATISTIC:
            return Answer(upload)
        size = len(view.train.ids)
        new = {"block": np.full(size, view.block, np.int32), "stays": np.ones(size, bool)}
        log = view.lists[self.name][TOLD].joined(Ragged(view.train.ptr, view.train.ids, new))
        return Answer(upload, {f"{PARTS}{self.name}/{TOLD}": log})

    # a budget

    def ledger(self) -> Ledger | None:
        return self.world.backbone.ledger()

    def _charged(self, view: CohortView, question: str) -> tuple[Arrays, Bools]:
        """What devices have left after an answer, and whose budget holds it; who has nothing to tell pays nothing."""
        ledger, account = self.ledger(), {name: view.parts[self.name][name] for name in ACCOUNT}
        assert ledger is not None
        if self._retracts(question):
            return self.after_taking_back(view.heads, account, view.lists[self.name][TOLD].counts() > 0)
        what, mu = self.world.backbone.loss(view.heads, question)
        return ledger.charge(account, what, mu, view.train.counts() > 0)

    def after_taking_back(self, heads: Arrays, account: Arrays, who: Bools) -> tuple[Arrays, Bools]:
        """Accounts once these people took something back: never refused, so it may cost more than was planned."""
        ledger = self.ledger()
        assert ledger is not None
        what, mu = self.world.backbone.loss(heads, RETRACTION)
        endless = {**account, "budget": np.full_like(account["budget"], NO_LIMIT)}
        charged, goes = ledger.charge(endless, what, mu, who)
        return {**charged, "budget": account["budget"]}, goes

    def noised(self, server: ServerState, total: Total, question: str) -> Total:
        return self.world.backbone.noised(server, total, question, self.world.draws)

    def promises(self, server: ServerState) -> dict[str, float]:
        return self.world.backbone.promises(server)

    def learn(self, server: ServerState, total: Total, question: str, expected: float) -> ServerState:
        return self.world.backbone.learn(server, total, question)

    def go_on(self, server: ServerState) -> ServerState:
        return self.world.backbone.try_next(server)

    # taking back

    @property
    def model(self) -> Retracts:
        model = self.world.backbone.retracts
        assert model is not None
        return model

    @property
    def takes_back(self) -> bool:
        return self.world.backbone.retracts is not None

    @property
    def lasting(self) -> frozenset[str]:
        kept = ((TOLD,) if self.takes_back else ()) + (ACCOUNT if self.ledger() else ())
        return frozenset(f"{PARTS}{self.name}/{one}" for one in kept)

    def device_arrays(self, n_users: int) -> Held:
        kinds: Arrays = {"block": np.zeros(0, np.int32), "stays": np.zeros(0, bool)}
        told = {TOLD: replace(Ragged.empty(n_users), values=kinds)} if self.takes_back else {}
        ledger = self.ledger()
        return {**told, **(ledger.opened(n_users, self.world.backbone.epsilon) if ledger else {})}

    def handle_many_here(self, view: CohortView, requests: Requests) -> Held:
        if not self.takes_back or requests.kind not in WITHDRAW:
            return {}
        log = view.lists[self.name][TOLD]
        stays = log.values["stays"] & ~requests.items.holds(log.rows(), log.ids)
        if requests.kind == "leave":
            stays = np.zeros(len(log.ids), bool)
        return {TOLD: replace(log, values={**log.values, "stays": stays})}

    def handle_many(
        self, server: ServerState, requests: Requests, ask: Ask, play: Play
    ) -> tuple[ServerState, dict[str, Any]] | None:
        """Ask for the retractions of all who wait, once they are enough; in a sum, nobody's own can be told."""
        if not self.takes_back or requests.kind not in WITHDRAW:
            return None
        self._check_plain()
        waiting = server.parts.get(self.name, {}).get(ASKED, np.zeros(0, np.uint64))
        asked = np.union1d(waiting, requests.senders)
        said = {"method": self.world.backbone.name, "exact": False, "subjects": asked}
        if len(asked) < self.model.held and not requests.alone:
            mode = f"waits until {self.model.held} users have asked"
            return server.with_part(self.name, {ASKED: asked}), said | {"mode": mode, "waits": True}
        change = ask(server, RETRACTION, asked).sums
        if not any(value.any() for value in change.values()):
            mode = "none: the server was told of none of it"
            return (server.with_part(self.name, {ASKED: asked[:0]}) if len(waiting) else server), said | {"mode": mode}
        after, rank = self.model.retracted(server, change)
        said |= self.model.retraction_said()
        return after.with_part(self.name, {ASKED: asked[:0]}), said | {
            "mode": f"update of rank {rank}" if rank else "new solve",
            "rounds": 1,
            "bytes_down": float(sum(wire_bytes(a) for a in after.heads.values())),
            "purged": ["told", "sums", "inverse", "weights"],
            "storage_server": float(sum(a.nbytes for part in after.parts.values() for a in part.values())),
        }

    def _retracts(self, question: str) -> bool:
        return question.startswith(f"{self.name}/")

    def _take_back(self, view: CohortView) -> Answer:
        """What people told before they withdrew some of it, and what is left; the device remembers what is left."""
        log = view.lists[self.name][TOLD]
        left = log.where(log.values["stays"])
        told, still = blocks_of(log), blocks_of(left)
        still += [Ragged.empty(len(log))] * (len(told) - len(still))
        change = self.model.retraction(view, told, still)
        upload = Upload(change, np.ones(view.n_clients), view.client_keys)
        says = _some(view, log.counts() > left.counts())
        return Answer(upload, {f"{PARTS}{self.name}/{TOLD}": left}, says=says)

    def _check_plain(self) -> None:
        for part in self.parts:
            if overrides(part, "weight") or overrides(part, "encode"):
                raise TacitaError(
                    f"part '{part.name}' changes what is told before it is summed, so it cannot be taken back; train "
                    "again without the data."
                )


def _some(view: CohortView, users: Bools) -> Bools:
    """The clients on which one of these users lives."""
    client = np.repeat(np.arange(view.n_clients), np.diff(view.user_ptr))
    return np.bincount(client, weights=users, minlength=view.n_clients) > 0


def blocks_of(log: Ragged) -> list[Ragged]:
    """What was told in each block, from a log of all of them."""
    block = log.values["block"] if len(log.ids) else np.zeros(0, np.int32)
    plain = Ragged(log.ptr, log.ids)
    return [plain.where(block == b) for b in range(int(block.max(initial=-1)) + 1)]
