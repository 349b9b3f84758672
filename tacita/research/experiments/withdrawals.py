"""Measures of withdrawals (FedShare's Table III): a trained run, a request to its service, and a retrained run.

All routes of unlearning get the same request: a drawn share of those who share take everything back. The reference is
the method itself from its first round on, with the same people, draws and number of rounds; it never had what was
withdrawn. Cells that learn alike share the trained run and the reference. Times are of the processor, because wall
clocks depend on who else uses the machine.
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
from tacita.federation.evaluation import TrainedState, build_ranking_mask, evaluate_devices, rename_unmasked_means
from tacita.federation.requests import RequestRounds, compute_shared_record_after
from tacita.federation.rounds import Progress, make_initial_progress, run_remaining_blocks
from tacita.methods import resolve_parts
from tacita.methods.sharing.contrastive_unlearning import ContrastiveUnlearning
from tacita.methods.sharing.retraining import RetrainPart
from tacita.methods.sharing.shared_graph_part import NAME as GRAPH
from tacita.metrics import Evaluation
from tacita.research.experiments.experiment_spec import ExperimentCell
from tacita.research.experiments.shared_base import ignore_round, with_parts
from tacita.research.experiments.single_block import (
    Line,
    Values,
    get_first_metric,
    pack_scores,
    require_single_block,
    round_metric_values,
)
from tacita.round.device_state import DeviceState, deep_copy_devices
from tacita.round.plan import Federation
from tacita.round.unlearning_report import sum_cost
from tacita.runs.forgetting.application import apply_request
from tacita.runs.forgetting.requests import ResolvedRequest, draw_unshare_request
from tacita.runs.forgetting.retraining import collect_shares
from tacita.runs.forgetting.routes import choose_route
from tacita.runs.forgetting.verdict import compute_auc_gap
from tacita.runs.forgetting.verification import AppliedRequest, compare_models
from tacita.runs.storage import measure_storage

_IDLE_PARTS = (ContrastiveUnlearning.name, RetrainPart.name)
"""Parts that change nothing before a request comes."""

RUN_VALUES = ("rounds", "best_round", "valid")
REPORT_VALUES = ("turns", "stopped", "exact", "shards", "segments", "skipped")


def build_learning_config(config: RunConfig) -> RunConfig:
    """The same run without what only a request needs; a retraining run keeps the tables that others learn with."""
    specs = resolve_parts(config.method, config.parts)
    names = [spec["name"] for spec in specs]
    retrains = RetrainPart.name in names
    parts = []
    for spec in map(dict, specs):
        is_graph = spec["name"] == GRAPH
        if retrains and is_graph and not spec.get("snapshots", 1):
            spec.pop("snapshots")
        if spec["name"] not in _IDLE_PARTS:
            parts.append(spec)
    return config.model_copy(update={"method": "fedavg", "parts": parts})


def make_job_key(config: RunConfig) -> str:
    """Cells with the same text share a trained run."""
    learning = build_learning_config(config)
    return json.dumps(["withdrawal", learning.model_dump(mode="json")], sort_keys=True)


@dataclass(frozen=True)
class TrainedBase:
    """A trained run, from which every request starts; it is never changed."""

    federation: Federation
    server: ServerState
    clients: DeviceState
    results: list[dict[str, Any]]

    @staticmethod
    def train_base_run(federation: Federation) -> TrainedBase:
        """The run to its best round; beside its own parts one counts rounds, for methods that retrain."""
        learning = build_learning_config(federation.config)
        parts = [*(learning.parts or []), {"name": RetrainPart.name}]
        counting = learning.model_copy(update={"parts": parts})
        federation = with_parts(federation, counting)
        require_single_block(federation)
        progress = make_initial_progress(federation)
        run_remaining_blocks(federation, progress, ignore_round)
        return TrainedBase(federation, progress.server, progress.clients, progress.results)

    def restore_progress(self, federation: Federation) -> Progress:
        """The run before a request, under the parts of a federation."""
        clients = deep_copy_devices(self.clients)
        clients.persistent = federation.persistent_names
        clients.take_snapshot()
        devices = LocalDevices(clients)
        results = list(self.results)
        return Progress(self.server, devices, self.server, in_block=True, results=results)


@dataclass(frozen=True)
class RetrainedReference:
    """The method from its first round on, without what was withdrawn."""

    learned: TrainedState
    seconds: float


def retrain_same_rounds(base: TrainedBase, request: ResolvedRequest) -> RetrainedReference:
    """As many rounds as the run took, with the same participants and draws."""
    federation = base.federation
    progress = base.restore_progress(federation)
    began = time.process_time()
    progress.devices.apply_requests(federation, progress.server, request.requests)
    shared = compute_shared_record_after(progress.server.shared, request.requests)
    server = replace(progress.server, shared=shared)
    play_round = RequestRounds(federation, progress, server, request.requests)
    server = play_round.restart_block(server, 0)
    for _ in range(base.server.round):
        server = play_round(server, None)
    trained = TrainedState(server, progress.clients)
    return RetrainedReference(trained, time.process_time() - began)


@dataclass
class WithdrawalJob:
    """The cells of a job: one trained run, and a reference for each share of people who withdraw."""

    federation: Federation  # of any of the cells
    references: dict[float, RetrainedReference] = field(default_factory=dict)

    @cached_property
    def base(self) -> TrainedBase:
        return TrainedBase.train_base_run(self.federation)

    def measure_cell(self, cell: ExperimentCell) -> Line:
        """The outcome of the request by one cell's route."""
        federation = with_parts(self.federation, cell.config)
        progress = self.base.restore_progress(federation)
        state = TrainedState(progress.server, progress.clients)
        shares = collect_shares(federation, state)
        user_keys = federation.stream.user_keys
        request = draw_unshare_request(shares.shared, user_keys, federation.draws, cell.withdraws)
        route = choose_route(federation, request, shares.take(request.users))
        storage = measure_storage(route.by[0], progress.server, progress.clients)
        applied = apply_request(federation, progress, request, route)
        reference = self._find_reference(cell.withdraws, request)
        return _build_line(self.base, applied, reference, storage.device_mean)

    def _find_reference(self, share: float, request: ResolvedRequest) -> RetrainedReference:
        if share not in self.references:
            self.references[share] = retrain_same_rounds(self.base, request)
        return self.references[share]


def _build_line(base: TrainedBase, applied: AppliedRequest, reference: RetrainedReference, device_bytes: float) -> Line:
    models = {"before": applied.before, "after": applied.after, "retrain": reference.learned}
    evaluations = {}
    for name, model in models.items():
        evaluations[name] = _evaluate_model(applied, model)
    comparison = compare_models(applied, models)
    auc = comparison["auc_pairs"]
    report = applied.part_reports[applied.route.by[0]]
    content = report.to_json()
    after = evaluations["after"]
    values: dict[str, float | None] = dict(after.means())
    for name, prefix in (("before", "before "), ("retrain", "retrained ")):
        for metric, value in evaluations[name].means().items():
            values[f"{prefix}{metric}"] = value
    values |= {
        "pair AUC before": auc["before"],
        "pair AUC": auc["after"],
        "pair AUC retrained": auc["retrain"],
        "pair AUC gap": compute_auc_gap(auc["after"], auc["retrain"]),
        "distance": comparison["param_distance_ratio"],
        "CPU seconds": applied.seconds_cpu,
        "of retraining": applied.seconds_cpu / max(reference.seconds, 1e-9),
        "clients asked": sum_cost([report], "clients_asked"),
        "MB on the server": sum_cost([report], "storage_server") / 1e6,
        "kB on a device": device_bytes / 1e3,
    }
    measured: Values = {}
    for metric, score in values.items():
        if score is not None:
            measured[metric] = score
    run = base.results[-1]
    user_scores = after.masked.values[get_first_metric(applied.federation)]
    return {
        "values": round_metric_values(measured),
        **{name: run[name] for name in RUN_VALUES},
        "withdraw": {"people": len(applied.request.users), "edges": len(applied.request.items.ids)},
        "auc": auc["ci"],
        "said": {name: content[name] for name in REPORT_VALUES if name in content},
        "notes": list(applied.federation.stream.notes),
        "users": pack_scores(user_scores),
    }


@dataclass(frozen=True)
class ModelEvaluation:
    """A model on the test items under the run's mask, and its means without any."""

    masked: Evaluation
    unmasked: Values

    def means(self) -> Values:
        return self.masked.compute_means() | self.unmasked


def _evaluate_model(applied: AppliedRequest, trained: TrainedState) -> ModelEvaluation:
    """With the items that devices still have; withdrawn items stay masked, so that all models rank the same."""
    federation = applied.federation
    last_block = federation.stream.blocks[-1]
    mask = build_ranking_mask(federation, last_block, "test", federation.config.evaluate.mask)
    no_mask = build_ranking_mask(federation, last_block, "test", "none")
    remaining = applied.remaining
    block = remaining.stream.blocks[-1]
    unmasked = evaluate_devices(remaining, trained, block, "test", no_mask)
    masked = evaluate_devices(remaining, trained, block, "test", mask)
    return ModelEvaluation(masked, rename_unmasked_means(unmasked))
