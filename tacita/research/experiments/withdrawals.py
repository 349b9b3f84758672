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
from tacita.federation.devices import LocalDevices
from tacita.federation.evaluation import TrainedState, build_mask, evaluate_devices, unmasked_means
from tacita.federation.requests import RequestRounds, update_shared_record
from tacita.federation.rounds import Progress, run_stream, start_run
from tacita.methods import resolve_parts
from tacita.methods.sharing.contrastive_unlearning import ContrastiveUnlearning
from tacita.methods.sharing.retraining import RetrainPart
from tacita.methods.sharing.shared_graph_part import NAME as GRAPH
from tacita.metrics import Evaluation
from tacita.research.experiments.experiment_spec import ExperimentCell
from tacita.research.experiments.shared_base import ignore_round, with_parts
from tacita.research.experiments.single_block import Line, first_metric, pack_scores, require_single_block, round_values
from tacita.round.device_state import DeviceState, deep_copy_devices
from tacita.round.plan import Federation
from tacita.runs.forgetting.request_service import apply_request
from tacita.runs.forgetting.requests import ResolvedRequest, draw_unshare_request
from tacita.runs.forgetting.retraining import collect_shares
from tacita.runs.forgetting.routes import choose_route
from tacita.runs.forgetting.verdict import auc_gap
from tacita.runs.forgetting.verification import AppliedRequest, compare_models
from tacita.runs.storage import measure_storage

_IDLE = (ContrastiveUnlearning.name, RetrainPart.name)
"""Parts that change nothing before a request comes."""


def learning_config(config: RunConfig) -> RunConfig:
    """The same run without what only a request needs; who retrains keeps the tables that others learn with."""
    parts = [dict(one) for one in resolve_parts(config.method, config.parts)]
    if any(one["name"] == RetrainPart.name for one in parts):
        for one in parts:
            if one["name"] == GRAPH and not one.get("snapshots", 1):
                one.pop("snapshots")
    return config.model_copy(update={"method": "fedavg", "parts": [one for one in parts if one["name"] not in _IDLE]})


def job_key(config: RunConfig) -> str:
    """Cells with the same text share a trained run."""
    return json.dumps(["withdrawal", learning_config(config).model_dump(mode="json")], sort_keys=True)


@dataclass(frozen=True)
class TrainedBase:
    """A trained run, from which requests start again and again; it is never changed."""

    federation: Federation
    server: ServerState
    clients: DeviceState
    results: list[dict[str, Any]]

    @staticmethod
    def train(fed: Federation) -> TrainedBase:
        """The run to its best round; beside its own parts one counts rounds, for those who retrain."""
        learning = learning_config(fed.config)
        counting = learning.model_copy(update={"parts": [*(learning.parts or []), {"name": RetrainPart.name}]})
        fed = with_parts(fed, counting)
        require_single_block(fed)
        progress = start_run(fed)
        run_stream(fed, progress, ignore_round)
        return TrainedBase(fed, progress.server, progress.clients, progress.results)

    def restore_progress(self, fed: Federation) -> Progress:
        """The run as a request finds it, under the parts of `fed`."""
        clients = deep_copy_devices(self.clients)
        clients.persistent = fed.persistent_names
        clients.take_snapshot()
        return Progress(self.server, LocalDevices(clients), self.server, in_block=True, results=list(self.results))


@dataclass(frozen=True)
class RetrainedReference:
    """The method from its first round on, without what was withdrawn."""

    learned: TrainedState
    seconds: float


def replay_run(base: TrainedBase, request: ResolvedRequest) -> RetrainedReference:
    """As many rounds as the run took, with the same participants and draws."""
    progress, fed = base.restore_progress(base.federation), base.federation
    began = time.process_time()
    progress.devices.apply_requests(fed, progress.server, request.requests)
    server = replace(progress.server, shared=update_shared_record(progress.server.shared, request.requests))
    play = RequestRounds(fed, progress, server)
    server = play.restart_block(server, 0)
    for _ in range(base.server.round):
        server = play(server, None)
    return RetrainedReference(TrainedState(server, progress.clients), time.process_time() - began)


@dataclass
class WithdrawalJob:
    """The cells of a job: one trained run, and a reference for each share of people who withdraw."""

    federation: Federation  # of any of the cells
    references: dict[float, RetrainedReference] = field(default_factory=dict)

    @cached_property
    def base(self) -> TrainedBase:
        return TrainedBase.train(self.federation)

    def measure_cell(self, cell: ExperimentCell) -> Line:
        """What became of the request in one cell's way."""
        fed, share = with_parts(self.federation, cell.config), cell.withdraws
        progress = self.base.restore_progress(fed)
        shares = collect_shares(fed, TrainedState(progress.server, progress.clients))
        asked = draw_unshare_request(shares.shared, fed.stream.user_keys, fed.draws, share)
        way = choose_route(fed, asked, shares.take(asked.users))
        device = measure_storage(way.by[0], progress.server, progress.clients).device_mean
        done = apply_request(fed, progress, asked, way)
        if share not in self.references:
            self.references[share] = replay_run(self.base, asked)
        return _build_line(self.base, done, self.references[share], device)


def _build_line(base: TrainedBase, done: AppliedRequest, anew: RetrainedReference, device: float) -> Line:
    models = {"before": done.before, "after": done.after, "retrain": anew.learned}
    useful = {name: _evaluate_model(done, one) for name, one in models.items()}
    found, (after, bare) = compare_models(done, models), useful["after"]
    auc, said = found["auc_pairs"], done.part_reports[done.route.by[0]]
    values: dict[str, float | None] = {**after.mean(), **bare}
    for name, prefix in (("before", "before "), ("retrain", "retrained ")):
        values |= {f"{prefix}{metric}": value for metric, value in (useful[name][0].mean() | useful[name][1]).items()}
    values |= {
        "pair AUC before": auc["before"],
        "pair AUC": auc["after"],
        "pair AUC retrained": auc["retrain"],
        "pair AUC gap": auc_gap(auc["after"], auc["retrain"]),
        "distance": found["param_distance_ratio"],
        "CPU seconds": done.seconds_cpu,
        "of retraining": done.seconds_cpu / max(anew.seconds, 1e-9),
        "clients asked": float(said["clients_asked"]),
        "MB on the server": said["storage_server"] / 1e6,
        "kB on a device": device / 1e3,
    }
    run, told = base.results[-1], ("turns", "stopped", "exact", "shards", "segments", "skipped")
    return {
        "values": round_values({name: value for name, value in values.items() if value is not None}),
        **{name: run[name] for name in ("rounds", "best_round", "valid")},
        "withdraw": {"people": len(done.request.users), "edges": len(done.request.items.ids)},
        "auc": auc["ci"],
        "said": {name: said[name] for name in told if name in said},
        "notes": list(done.federation.stream.notes),
        "users": pack_scores(after.values[first_metric(done.federation)]),
    }


def _evaluate_model(done: AppliedRequest, learned: TrainedState) -> tuple[Evaluation, dict[str, float]]:
    """On the test items, by what devices have now; what was withdrawn stays hidden, so that all rank the same."""
    left, block = done.remaining, done.remaining.stream.blocks[-1]
    mask = build_mask(done.federation, done.federation.stream.blocks[-1], "test", done.federation.config.evaluate.mask)
    nothing = build_mask(done.federation, done.federation.stream.blocks[-1], "test", "none")
    bare = unmasked_means(evaluate_devices(left, learned, block, "test", nothing))
    return evaluate_devices(left, learned, block, "test", mask), bare
