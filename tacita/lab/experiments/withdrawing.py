"""What is told of taking back (FedShare's Table III): a trained run, a request through the door, the run played anew.

All ways of unlearning get the same request: a drawn share of those who share take everything back. The reference is
the method itself from its first round on, with the same people, draws and number of rounds, of whom some never had what
was withdrawn. Cells that learn alike share the trained run and the reference. Times are of the processor: wall clocks
tell who else was using the machine.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tacita.core.config import RunConfig
from tacita.core.types import ServerState
from tacita.federation.devices import Here
from tacita.federation.measuring import Learned, as_unmasked, evaluate_devices, known_items
from tacita.federation.requests import Rounds, given_after
from tacita.federation.rounds import Progress, run_stream, start
from tacita.lab.experiments.once import Line, first_metric, only_block, pack, rounded
from tacita.lab.experiments.plan import Cell
from tacita.lab.experiments.shared_base import silent, with_parts
from tacita.lab.forgetting.anew import shares_of
from tacita.lab.forgetting.door import carried_out
from tacita.lab.forgetting.paths import way_of
from tacita.lab.forgetting.proof import Done, compared
from tacita.lab.forgetting.verdict import gap_of
from tacita.lab.forgetting.wishes import Asked, taking_back
from tacita.lab.storage import kept_by
from tacita.methods import effective_parts
from tacita.methods.sharing.graph_learning import NAME as GRAPH
from tacita.methods.sharing.retrain import Retrain
from tacita.methods.sharing.unlearning import ContrastiveUnlearning
from tacita.metrics import Evaluation
from tacita.round.device_state import DeviceState, apart
from tacita.round.plan import Federation

_IDLE = (ContrastiveUnlearning.name, Retrain.name)
"""Parts that change nothing before a request comes."""


def learning_of(config: RunConfig) -> RunConfig:
    """The same run without what only a request needs; who retrains keeps the tables that others learn with."""
    parts = [dict(one) for one in effective_parts(config.method, config.parts)]
    if any(one["name"] == Retrain.name for one in parts):
        for one in parts:
            if one["name"] == GRAPH and not one.get("snapshots", 1):
                one.pop("snapshots")
    return config.model_copy(update={"method": "fedavg", "parts": [one for one in parts if one["name"] not in _IDLE]})


def job_of(config: RunConfig) -> str:
    """Cells with the same text share a trained run."""
    return json.dumps(["withdrawal", learning_of(config).model_dump(mode="json")], sort_keys=True)


@dataclass(frozen=True)
class Base:
    """A trained run, from which requests start again and again; it is never changed."""

    fed: Federation
    server: ServerState
    clients: DeviceState
    results: list[dict[str, Any]]

    @staticmethod
    def of(fed: Federation) -> Base:
        """The run to its best round; beside its own parts one counts rounds, for those who retrain."""
        learning = learning_of(fed.config)
        counting = learning.model_copy(update={"parts": [*(learning.parts or []), {"name": Retrain.name}]})
        fed = with_parts(fed, counting)
        only_block(fed)
        progress = start(fed)
        run_stream(fed, progress, silent)
        return Base(fed, progress.server, progress.clients, progress.results)

    def standing(self, fed: Federation) -> Progress:
        """The run as a request finds it, under the parts of `fed`."""
        clients = apart(self.clients)
        clients.lasting = fed.lasting
        clients.keep()
        return Progress(self.server, Here(clients), self.server, in_block=True, results=list(self.results))


@dataclass(frozen=True)
class Anew:
    """The method from its first round on, without what was withdrawn."""

    learned: Learned
    seconds: float


def played_anew(base: Base, asked: Asked) -> Anew:
    """As many rounds as the run took, with the same participants and draws."""
    progress, fed = base.standing(base.fed), base.fed
    began = time.process_time()
    progress.devices.request(fed, progress.server, asked.requests)
    server = replace(progress.server, given=given_after(progress.server.given, asked.requests))
    play = Rounds(fed, progress, server)
    server = play.begin(server, 0)
    for _ in range(base.server.round):
        server = play(server, None)
    return Anew(Learned(server, progress.clients), time.process_time() - began)


@dataclass
class Withdrawals:
    """The cells of a job: one trained run, and a reference for each share of people who withdraw."""

    data: Federation  # of any of the cells
    anew: dict[float, Anew] = field(default_factory=dict)

    @cached_property
    def base(self) -> Base:
        return Base.of(self.data)

    def told(self, cell: Cell) -> Line:
        """What became of the request in one cell's way."""
        fed, share = with_parts(self.data, cell.config), cell.withdraws
        progress = self.base.standing(fed)
        shares = shares_of(fed, Learned(progress.server, progress.clients))
        asked = taking_back(shares.shared, fed.stream.user_keys, fed.draws, share)
        way = way_of(fed, asked, shares.take(asked.users))
        device = kept_by(way.by[0], progress.server, progress.clients).device_mean
        done = carried_out(fed, progress, asked, way)
        if share not in self.anew:
            self.anew[share] = played_anew(self.base, asked)
        return _line(self.base, done, self.anew[share], device)


def _line(base: Base, done: Done, anew: Anew, device: float) -> Line:
    models = {"before": done.was, "after": done.now, "retrain": anew.learned}
    useful = {name: _measured(done, one) for name, one in models.items()}
    found, (after, bare) = compared(done, models), useful["after"]
    auc, said = found["auc_pairs"], done.said[done.way.by[0]]
    values: dict[str, float | None] = {**after.mean(), **bare}
    for name, prefix in (("before", "before "), ("retrain", "retrained ")):
        values |= {f"{prefix}{metric}": value for metric, value in (useful[name][0].mean() | useful[name][1]).items()}
    values |= {
        "pair AUC before": auc["before"],
        "pair AUC": auc["after"],
        "pair AUC retrained": auc["retrain"],
        "pair AUC gap": gap_of(auc["after"], auc["retrain"]),
        "distance": found["param_distance_ratio"],
        "CPU seconds": done.seconds_cpu,
        "of retraining": done.seconds_cpu / max(anew.seconds, 1e-9),
        "clients asked": float(said["clients_asked"]),
        "MB on the server": said["storage_server"] / 1e6,
        "kB on a device": device / 1e3,
    }
    run, told = base.results[-1], ("turns", "stopped", "exact", "shards", "segments", "skipped")
    return {
        "values": rounded({name: value for name, value in values.items() if value is not None}),
        **{name: run[name] for name in ("rounds", "best_round", "valid")},
        "withdraw": {"people": len(done.asked.users), "edges": len(done.asked.items.ids)},
        "auc": auc["ci"],
        "said": {name: said[name] for name in told if name in said},
        "notes": list(done.fed.stream.notes),
        "users": pack(after.values[first_metric(done.fed)]),
    }


def _measured(done: Done, learned: Learned) -> tuple[Evaluation, dict[str, float]]:
    """On the test items, by what devices have now; what was withdrawn stays hidden, so that all rank the same."""
    left, block = done.left, done.left.stream.blocks[-1]
    mask = known_items(done.fed, done.fed.stream.blocks[-1], "test", done.fed.config.evaluate.mask)
    nothing = known_items(done.fed, done.fed.stream.blocks[-1], "test", "none")
    bare = as_unmasked(evaluate_devices(left, learned, block, "test", nothing))
    return evaluate_devices(left, learned, block, "test", mask), bare
