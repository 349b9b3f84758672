"""Measures of withdrawals (FedShare's Table III): a trained run, a request to its service, and a retrained run.

All routes of unlearning get the same request: a drawn share of those who share take everything back. The reference is
the method itself from its first round on, with the same people, draws and number of rounds; it never had what was
withdrawn. Cells that learn alike share the trained run and the reference. Times are of the processor, because wall
clocks depend on who else uses the machine. A distance counts beside that of retraining with other draws, its floor.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tacita.core.config import RunConfig
from tacita.core.draws import Draws
from tacita.core.types import Floats, ServerState
from tacita.federation.devices import LocalDevices
from tacita.federation.evaluation import TrainedState, build_ranking_mask, evaluate_devices, rename_unmasked_means
from tacita.federation.requests import RequestRounds, compute_shared_record_after
from tacita.federation.rounds import Progress, make_initial_progress, run_remaining_blocks
from tacita.methods import resolve_parts
from tacita.methods.sharing.contrastive_unlearning import ContrastiveUnlearning
from tacita.methods.sharing.ordinary_rounds import OrdinaryRounds
from tacita.methods.sharing.retraining import RetrainPart
from tacita.methods.sharing.shared_graph_part import NAME as GRAPH
from tacita.metrics import Evaluation
from tacita.research.experiments.experiment_cell import ExperimentCell
from tacita.research.experiments.planted_items import PlantedItems
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
from tacita.runs.forgetting.retraining import find_shared_and_learned_items
from tacita.runs.forgetting.routes import choose_route
from tacita.runs.forgetting.traces import build_item_table, measure_gram_distance, sample_items
from tacita.runs.forgetting.verdict import compute_auc_gap
from tacita.runs.forgetting.verification import AppliedRequest, compare_models
from tacita.runs.storage import measure_storage

_IDLE_PARTS = (ContrastiveUnlearning.name, OrdinaryRounds.name, RetrainPart.name)
"""Parts that change nothing before a request comes."""

_TABLE_FREE_PARTS = (OrdinaryRounds.name, RetrainPart.name)
"""Those of them that read no earlier tables."""

_OTHER_SEED = 1_000_003  # from a run's seed to that of its floor

Measured = dict[str, float | None]
"""Values by metric; None: could not be measured."""

RUN_VALUES = ("rounds", "best_round", "valid")
REPORT_VALUES = ("turns", "stopped", "exact", "shards", "segments", "skipped")


def build_learning_config(config: RunConfig) -> RunConfig:
    """The same run without what only a request needs; runs that need no earlier tables keep those of the others."""
    specs = resolve_parts(config.method, config.parts)
    names = [spec["name"] for spec in specs]
    needs_no_tables = any(name in _TABLE_FREE_PARTS for name in names)
    parts = []
    for spec in map(dict, specs):
        is_graph = spec["name"] == GRAPH
        if needs_no_tables and is_graph and not spec.get("snapshots", 1):
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
        """The run to its best round; beside its own parts it keeps what requests need: rounds, the first table."""
        learning = build_learning_config(federation.config)
        parts = [
            *(learning.parts or []),
            {"name": RetrainPart.name},
            {"name": ContrastiveUnlearning.name, "reset": 1.0},
        ]
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


def retrain_same_rounds(base: TrainedBase, request: ResolvedRequest, draws: Draws | None = None) -> RetrainedReference:
    """As many rounds as the run took, with the same participants and draws; or with others."""
    federation = base.federation
    if draws is not None:
        federation = with_parts(replace(federation, draws=draws), federation.config)
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


@dataclass(frozen=True)
class CarriedRequest:
    """A request that was carried out on a trained run, and the models that it is compared with."""

    applied: AppliedRequest
    reference: RetrainedReference
    device_bytes: float  # that a device keeps for the route

    @property
    def models(self) -> dict[str, TrainedState]:
        return {"before": self.applied.before, "after": self.applied.after, "retrain": self.reference.learned}

    def build_tables(self) -> dict[str, Floats]:
        """The item rows that devices score with."""
        remaining = self.applied.remaining
        return {name: build_item_table(remaining, model) for name, model in self.models.items()}


@dataclass
class RequestedRun:
    """A trained run, and a reference for each share of people who withdraw."""

    federation: Federation  # of any of the cells
    references: dict[float, RetrainedReference] = field(default_factory=dict)

    @cached_property
    def base(self) -> TrainedBase:
        return TrainedBase.train_base_run(self.federation)

    def carry_out(self, cell: ExperimentCell) -> CarriedRequest:
        """The request of a cell, by its route."""
        federation = with_parts(self.federation, cell.config)
        progress = self.base.restore_progress(federation)
        state = TrainedState(progress.server, progress.clients)
        shares = find_shared_and_learned_items(federation, state)
        user_keys = federation.stream.user_keys
        request = draw_unshare_request(shares.shared, user_keys, federation.draws, cell.withdraws)
        route = choose_route(federation, request, shares.take(request.users))
        storage = measure_storage(route.by[0], progress.server, progress.clients)
        applied = apply_request(federation, progress, request, route)
        if cell.withdraws not in self.references:
            self.references[cell.withdraws] = retrain_same_rounds(self.base, request)
        return CarriedRequest(applied, self.references[cell.withdraws], storage.device_mean)


@dataclass
class WithdrawalJob:
    """The cells of a job: one trained run, and the same with planted items, which no other figure is measured on."""

    federation: Federation  # of any of the cells
    floors: dict[float, RetrainedReference] = field(default_factory=dict)  # with other draws

    @cached_property
    def run(self) -> RequestedRun:
        return RequestedRun(self.federation)

    @cached_property
    def planted(self) -> PlantedItems:
        base = self.run.base
        state = TrainedState(base.server, base.clients)
        return PlantedItems.plant(self.federation.stream, find_shared_and_learned_items(base.federation, state).shared)

    @cached_property
    def planted_run(self) -> RequestedRun:
        return RequestedRun(replace(self.federation, stream=self.planted.stream))

    def measure_cell(self, cell: ExperimentCell) -> Line:
        """The outcome of the request by one cell's route."""
        carried = self.run.carry_out(cell)
        evaluations = {name: _evaluate_model(carried.applied, model) for name, model in carried.models.items()}
        values = _measure_request(carried, evaluations)
        values |= self._measure_distances(carried, cell.withdraws)
        values |= self._measure_planted_items(cell)
        return _build_line(self.run.base, carried.applied, values, evaluations["after"])

    def _measure_distances(self, carried: CarriedRequest, share: float) -> Measured:
        """Distances to the retrained model, where 1 is that of the model before; and those of another seed."""
        request = carried.applied.request
        if share not in self.floors:
            draws = replace(self.federation.draws, seed=self.federation.draws.seed + _OTHER_SEED)
            self.floors[share] = retrain_same_rounds(self.run.base, request, draws)
        remaining = carried.applied.remaining
        tables = carried.build_tables()
        tables["another seed"] = build_item_table(remaining, self.floors[share].learned)
        items = sample_items(remaining)
        gram = {name: measure_gram_distance(table, tables["retrain"], items) for name, table in tables.items()}
        straight = {name: float(np.linalg.norm(table - tables["retrain"])) for name, table in tables.items()}
        return {
            "Gram distance": _divide(gram["after"], gram["before"]),
            "another seed: distance": _divide(straight["another seed"], straight["before"]),
            "another seed: Gram distance": _divide(gram["another seed"], gram["before"]),
        }

    def _measure_planted_items(self, cell: ExperimentCell) -> Measured:
        if not len(self.planted.owners):
            return {}
        carried = self.planted_run.carry_out(cell)
        users = carried.applied.request.users.astype(np.int64)
        tables = carried.build_tables()
        auc = {name: self.planted.measure_auc(table, users) for name, table in tables.items()}
        return {"canary AUC before": auc["before"], "canary AUC": auc["after"], "canary AUC retrained": auc["retrain"]}


def _divide(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else value / by


def _measure_request(carried: CarriedRequest, evaluations: dict[str, ModelEvaluation]) -> Measured:
    """Quality, cost, and the distance of the whole model."""
    applied = carried.applied
    values: Measured = dict(evaluations["after"].means())
    for name, prefix in (("before", "before "), ("retrain", "retrained ")):
        for metric, value in evaluations[name].means().items():
            values[f"{prefix}{metric}"] = value
    comparison = compare_models(applied, carried.models)
    auc = comparison["auc_pairs"]
    report = applied.part_reports[applied.route.by[0]]
    return values | {
        "pair AUC before": auc["before"],
        "pair AUC": auc["after"],
        "pair AUC retrained": auc["retrain"],
        "pair AUC gap": compute_auc_gap(auc["after"], auc["retrain"]),
        "distance": comparison["param_distance_ratio"],
        "CPU seconds": applied.seconds_cpu,
        "of retraining": applied.seconds_cpu / max(carried.reference.seconds, 1e-9),
        "clients asked": sum_cost([report], "clients_asked"),
        "MB on the server": sum_cost([report], "storage_server") / 1e6,
        "kB on a device": carried.device_bytes / 1e3,
    }


def _build_line(base: TrainedBase, applied: AppliedRequest, values: Measured, evaluation: ModelEvaluation) -> Line:
    measured: Values = {metric: value for metric, value in values.items() if value is not None}
    content = applied.part_reports[applied.route.by[0]].to_json()
    run = base.results[-1]
    user_scores = evaluation.masked.values[get_first_metric(applied.federation)]
    return {
        "values": round_metric_values(measured),
        **{name: run[name] for name in RUN_VALUES},
        "withdraw": {"people": len(applied.request.users), "edges": len(applied.request.items.ids)},
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
