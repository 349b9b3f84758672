"""FedShare's tables: one request for every method, a reference that is the method itself, pages, and a fair search."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tacita.core.errors import TacitaError
from tacita.core.types import Ragged
from tacita.federation.evaluation import TrainedState
from tacita.research.experiments import (
    axes,
    cells,
    experiment_cell,
    experiment_spec,
    learning_rates,
    low_discrepancy,
    reproduction,
    single_block,
    table_markdown,
    tables,
    withdrawals,
)
from tacita.research.experiments.shared_base import with_parts
from tacita.research.experiments.workers import Workers
from tacita.runs.assembly import Machine, assemble_federation, build_components
from tacita.runs.forgetting.application import apply_request
from tacita.runs.forgetting.requests import draw_unshare_request
from tacita.runs.forgetting.retraining import find_shared_and_learned_items, find_shared_items
from tacita.runs.forgetting.routes import choose_route

SMALL = "synthetic:users=60,items=50,per_user=14,groups=4"
SHARING = {"sharing": {"groups": [2, 3, 3]}}
QUICK = {"contrastive-unlearning": {"rounds": 2, "steps": 3}}
ONE_ROUND_OF_ALL = {"participation": {"kind": "all"}, "weigh_by": "clients"}


def variant(label: str, method: str, withdraws: float = 0.0, **more: Any) -> dict[str, Any]:
    options = {**SHARING, **more.pop("options", {})}
    return {"label": label, "method": method, "withdraws": withdraws, "options": options, **more}


VARIANTS: dict[str, dict[str, Any]] = {
    "popular": {"label": "most popular", "method": "fedavg", "kind": "popular"},
    "tally": {"label": "tally", "method": "fedavg", "backbone": {"name": "tally"}, "train": ONE_ROUND_OF_ALL},
    "fedshare": variant("FedShare", "fedshare"),
    "retrain": variant("retrain", "fedshare-retrain", 0.5, settings_of="fedshare"),
    "contrast": variant("contrast", "fedshare", 0.5, options=QUICK),
    "alone": variant(
        "alone", "fedshare", 0.5, options={"contrastive-unlearning": {"rounds": 1, "remaining_rounds": False}}
    ),
    "all": variant("all of them", "fedshare-retrain", 1.0, settings_of="fedshare"),
    "rounds": variant(
        "ordinary rounds", "fedshare-rounds", 0.5, settings_of="fedshare", options={"ordinary-rounds": {"rounds": 2}}
    ),
    "rollback": variant("rollback", "fedshare-rollback", 0.5, settings_of="fedshare"),
    "fru": variant("FRU", "fedshare-fru", 0.5, settings_of="fedshare"),
    "cufru": variant("CUFRU-like", "fedshare-cufru", 0.5, settings_of="fedshare"),
    "cfru": variant("CFRU", "fedshare-cfru", 0.5, settings_of="fedshare"),
    "decoupled": variant(
        "decoupled", "fedshare-decoupled", 0.5, options={"decoupled": {"sync_every": 2, "steps": 4, "shards": 3}}
    ),
    "replay": variant("replay", "fedshare-replay", 0.5, settings_of="fedshare"),
}


def small_table(**more: Any) -> experiment_spec.Experiment:
    message: dict[str, Any] = {
        "title": "Small",
        "kind": "once",
        "rows": "methods",
        "datasets": [SMALL],
        "backbones": ["ego"],
        "seeds": 1,
        "metrics": ["ndcg@5", "unmasked hr@5", "pair AUC gap", "distance", "clients asked", "MB on the server"],
        "published_columns": ["test"],
        "baseline": "fedshare",
        "quick": {"datasets": [SMALL], "backbones": ["ego"], "seeds": 1},
        "train": {"rounds": 4, "participation": {"kind": "fraction", "rate": 0.5}, "aggregation": "per-row"},
        "split": {"kind": "random", "min_user": 5},
        "evaluate": {"k": [5], "metrics": ["ndcg", "hr"], "select_by": "ndcg@5", "every": 2, "unmasked": True},
        "variants": VARIANTS,
        "published": {SMALL: {"ego": {"ndcg@5": {"contrast": [0.4]}}}},
    }
    return experiment_spec.Experiment.model_validate(message | more)


def planned(experiment: experiment_spec.Experiment) -> list[experiment_cell.ExperimentCell]:
    return experiment_spec.list_cells(experiment, experiment_spec.Settings(), [SMALL], ["ego"], 1)


@pytest.fixture(scope="module")
def table(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[reproduction.TablePlan, Path, dict[str, single_block.Line]]:
    """All of it, once."""
    experiment, out = small_table(), tmp_path_factory.mktemp("tables")
    wanted = reproduction.TablePlan(experiment, planned(experiment), "mine", "small")
    reproduction.reproduce_table(wanted, out, workers=Workers(1))
    text = (out / "cells" / f"mine-{SMALL}-ego.jsonl").read_text()
    lines = {line["variant"]: line for line in map(json.loads, text.splitlines())}
    return wanted, out, lines


TAKING_BACK = [name for name, one in VARIANTS.items() if one.get("withdraws")]


def test_every_method_gets_the_same_request(table: Any) -> None:
    _, _, lines = table
    assert {name: lines[name].get("failed") for name in VARIANTS if "failed" in lines[name]} == {}
    request = {name: tuple(lines[name]["withdraw"].values()) for name in TAKING_BACK}
    assert len(set(request.values()) - {request["all"]}) == 1
    assert request["all"] > request["retrain"]


def test_the_same_people_withdraw_the_same_items_whatever_the_method() -> None:
    result = []
    for cell in planned(small_table()):
        if cell.variant in ("contrast", "fru", "decoupled"):
            fed = assemble_federation(cell.config, Machine(threads=1))
            base = withdrawals.TrainedBase.train_base_run(fed)
            shared = find_shared_items(fed, TrainedState(base.server, base.clients))
            unshare_request = draw_unshare_request(shared, fed.stream.user_keys, fed.draws, 0.5)
            result.append(
                (
                    unshare_request.requests.senders.tolist(),
                    unshare_request.items.ptr.tolist(),
                    unshare_request.items.ids.tolist(),
                )
            )
    assert len(result) == 3
    assert result[0] == result[1] == result[2]


def test_retraining_and_what_is_exact_have_no_distance_and_others_have(table: Any) -> None:
    _, _, lines = table
    for name in ("retrain", "decoupled", "all"):
        values = lines[name]["values"]
        assert values["distance"] == [0.0], name
        assert values["pair AUC gap"] == [0.0]
        assert values["ndcg@5"] == values["retrained ndcg@5"]
    for name in ("contrast", "alone", "rounds", "rollback", "fru", "cufru", "replay", "cfru"):
        assert lines[name]["values"]["distance"][0] > 1e-3, name


def test_distances_stand_beside_those_of_another_seed(table: Any) -> None:
    _, _, lines = table
    for name in ("retrain", "decoupled", "all"):
        assert lines[name]["values"]["Gram distance"] == [0.0], name
    for name in TAKING_BACK:
        values = lines[name]["values"]
        assert values["another seed: Gram distance"][0] > 0.01, name
        assert values["another seed: distance"][0] > 0.5, name
    floors = {lines[name]["values"]["another seed: distance"][0] for name in ("retrain", "contrast", "rounds")}
    assert len(floors) == 1  # one trained run, one floor


def test_planted_items_tell_who_shared_them_until_they_are_forgotten(table: Any) -> None:
    _, _, lines = table
    values = {name: lines[name]["values"] for name in TAKING_BACK}
    assert values["retrain"]["canary AUC"] == values["retrain"]["canary AUC retrained"]
    assert values["decoupled"]["canary AUC"] == values["decoupled"]["canary AUC retrained"]
    assert values["rounds"]["canary AUC before"][0] > values["rounds"]["canary AUC retrained"][0]


def test_planted_items_are_their_owners_own_and_change_nothing_else() -> None:
    [cell] = [entry for entry in planned(small_table()) if entry.variant == "contrast"]
    fed = assemble_federation(cell.config, Machine(threads=1))
    job = withdrawals.WithdrawalJob(fed)
    planted = job.planted
    block, changed = fed.stream.blocks[0], planted.stream.blocks[0]
    assert len(planted.owners) == round(60 * 2 / 8)
    assert changed.n_items == len(planted.stream.item_keys) == block.n_items + len(planted.owners)
    lists = [changed.train.row(user).tolist() for user in range(60)]
    for owner, item in zip(planted.owners.tolist(), planted.items.tolist(), strict=True):
        assert [user for user, items in enumerate(lists) if item in items] == [owner]
    old = changed.train.filter_entries(changed.train.ids < block.n_items)
    np.testing.assert_array_equal(old.ids, block.train.ids)
    np.testing.assert_array_equal(old.ptr, block.train.ptr)
    rng = np.random.default_rng(1)
    table = rng.normal(size=(changed.n_items, 8))
    untold = planted.measure_auc(table, planted.owners)
    assert untold is not None
    assert 0.2 < untold < 0.8
    for place, item in enumerate(planted.items):
        table[item] = table[planted.others.row(place)].mean(axis=0)
    assert planted.measure_auc(table, planted.owners) == pytest.approx(1.0, abs=0.05)
    assert planted.measure_auc(table, planted.owners[:1]) is None


def test_table_reports_the_cost_of_unlearning(table: Any) -> None:
    _, _, lines = table
    values = {name: lines[name]["values"] for name in TAKING_BACK}
    rounds, present = lines["retrain"]["best_round"], values["retrain"]["clients asked"][0]
    assert present == rounds * 30  # half of sixty people in every round
    for name in ("alone", "decoupled", "cfru", "replay"):
        assert values[name]["clients asked"] == [0.0], name
    for name in ("contrast", "rollback", "cufru", "cfru", "decoupled", "replay"):
        assert values[name]["MB on the server"][0] > 0, name
    assert values["retrain"]["MB on the server"] == [0.0]
    assert values["fru"]["kB on a device"][0] > 0 == values["contrast"]["kB on a device"][0]
    assert all(value["CPU seconds"][0] > 0 for value in values.values())


def test_cells_that_learn_alike_share_the_run_and_leave_it_as_it_was(table: Any) -> None:
    wanted, _, lines = table
    jobs = {}
    for cell in wanted.cells:
        jobs.setdefault(cells._digest_job(cell), []).append(cell.variant)
    assert ["retrain", "contrast", "alone", "all", "rounds", "rollback"] in jobs.values()
    before = {json.dumps(lines[n]["values"]["before ndcg@5"]) for n in ("retrain", "contrast", "alone")}
    assert len(before) == 1
    assert lines["retrain"]["values"]["pair AUC before"] == lines["contrast"]["values"]["pair AUC before"]
    trained = {"masked": lines["fedshare"]["best_round"], "request": lines["contrast"]["best_round"]}
    assert len(set(trained.values())) == 1  # the learning row is the same run


def test_results_before_a_request_are_independent_of_it() -> None:
    [cell] = [entry for entry in planned(small_table()) if entry.variant == "contrast"]
    fed = assemble_federation(cell.config, Machine(threads=1))
    base = withdrawals.TrainedBase.train_base_run(fed)
    private = base.clients.private.copy()
    fed = with_parts(fed, cell.config)
    progress = base.restore_progress(fed)
    shares = find_shared_and_learned_items(fed, TrainedState(progress.server, progress.clients))
    unshare_request = draw_unshare_request(shares.shared, fed.stream.user_keys, fed.draws, 0.5)
    done = apply_request(
        fed, progress, unshare_request, choose_route(fed, unshare_request, shares.take(unshare_request.users))
    )
    assert not np.array_equal(done.after.clients.private, private)  # devices played rounds
    np.testing.assert_array_equal(done.before.clients.private, private)
    np.testing.assert_array_equal(base.clients.private, private)
    state = done.before.clients.read_list("parts/sharing/shared", unshare_request.users)
    assert len(state.ids) == len(unshare_request.items.ids)  # as they were: nothing was withdrawn yet


def test_withdrawn_items_stay_hidden_in_the_test(table: Any) -> None:
    """Methods rank the same candidates: retraining with everything withdrawn is measured under the first mask."""
    _, _, lines = table
    users = {
        name: len(single_block.unpack_scores(lines[name]["users"]))
        for name in ("fedshare", "retrain", "all", "popular")
    }
    assert len(set(users.values())) == 1


def test_the_page_has_a_line_for_every_method_and_a_column_for_every_metric(table: Any) -> None:
    wanted, out, lines = table
    page = (out / "mine" / "small.md").read_text()
    assert f"**{SMALL}, ego**" in page
    head = next(line for line in page.splitlines() if line.startswith("| method"))
    assert head.strip("| ").split(" | ") == ["method", *wanted.experiment.metrics, "seeds"]
    report = [line for line in page.splitlines() if line.startswith("| ")][1:15]
    assert [line.split(" | ")[0].removeprefix("| ") for line in report] == [
        entry["label"] for entry in VARIANTS.values()
    ]
    popular = next(line for line in report if "most popular" in line)
    assert popular.split(" | ")[1:3] == [f"{lines['popular']['values'][m][0]:.4f}" for m in ("ndcg@5", "unmasked hr@5")]
    assert popular.count("–") == 4
    assert "(0.4000 " in next(line for line in report if line.startswith("| contrast"))
    assert "tally" in (out / "mine" / "small.html").read_text()


def test_large_numbers_have_fewer_digits() -> None:
    entry = tables.TableEntry("d", "b", "m", "v", "test", 12345.678, float("nan"), 1, None, "")
    assert table_markdown.format_cell(entry) == "12,346"
    assert table_markdown.format_cell(replace(entry, mean=45.678, half=1.26)) == "45.7 ± 1.3"
    assert (
        table_markdown.format_cell(replace(entry, mean=0.45678, published=0.4, verdict="higher"))
        == "0.4568<br>(0.4000 higher)"
    )


def test_an_interrupted_table_goes_on_where_it_was(table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _, lines = table
    some = replace(wanted, cells=[c for c in wanted.cells if c.variant in ("popular", "retrain", "contrast", "cfru")])
    real, done = cells.run_job, []

    def stopping(job: cells.CellJob) -> list[single_block.Line]:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append([cell.variant for cell in job.cells])
        return real(job)

    monkeypatch.setattr(cells, "run_job", stopping)
    with pytest.raises(KeyboardInterrupt):
        reproduction.reproduce_table(some, tmp_path, workers=Workers(1))
    assert done == [["popular"], ["retrain", "contrast"]]
    done.clear()
    result = reproduction.reproduce_table(some, tmp_path, workers=Workers(1))
    assert done == [["cfru"]]
    for entry in result.entries:
        if entry.metric in ("ndcg@5", "distance", "pair AUC gap"):
            assert entry.mean == lines[entry.variant]["values"][entry.metric][0]


def test_a_table_can_be_written_of_what_is_finished(
    table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, out, _ = table
    whole, _ = reproduction.read_finished(wanted, out)
    assert replace(whole, planned=None) == wanted
    assert whole.planned == wanted
    (tmp_path / "cells").mkdir()
    name = f"mine-{SMALL}-ego.jsonl"
    two = (out / "cells" / name).read_text().splitlines(keepends=True)[:2]
    (tmp_path / "cells" / name).write_text("".join(two))
    monkeypatch.setattr(cells, "run_job", lambda job: pytest.fail("nothing is to be run"))
    some, _ = reproduction.read_finished(wanted, tmp_path)
    assert (len(some.cells), some.stem) == (2, "small-part")
    assert len({entry.variant for entry in reproduction.write_finished_table(wanted, tmp_path).entries}) == 2
    with pytest.raises(TacitaError, match="no cell of this table is finished"):
        reproduction.read_finished(wanted, tmp_path / "elsewhere")


def test_untrainable_run_is_recorded_in_all_its_cells() -> None:
    experiment = small_table(split={"kind": "blocks", "n_blocks": 2})
    some = tuple(c for c in planned(experiment) if c.variant in ("retrain", "contrast"))
    job = cells.run_job(cells.CellJob(some, None))
    assert [line["failed"].split(";")[0] for line in job] == ["a table of kind 'once' wants one block"] * 2


def test_table_without_sharers_is_refused_in_one_sentence() -> None:
    with pytest.raises(TacitaError, match="nobody in this run shares anything"):
        draw_unshare_request(
            Ragged.empty(3), np.zeros(3, np.uint64), build_components(planned(small_table())[0].config)[2], 0.3
        )


def test_cell_key_depends_on_who_withdraws() -> None:
    entry = next(c for c in planned(small_table()) if c.variant == "contrast")
    assert replace(entry, withdraws=0.6).key != entry.key
    assert replace(entry, variant="renamed").key == entry.key
    assert replace(entry, withdraws=0.0, kind="once").key != entry.key


# the files


FILES = [name for name in experiment_spec.list_experiments() if name.startswith("fedshare/")]


@pytest.mark.parametrize("name", FILES)
def test_every_cell_of_the_files_can_be_built_and_stands_beside_most_popular(name: str) -> None:
    experiment, settings = experiment_spec.load_experiment(name)
    result = experiment_spec.list_cells(experiment, settings, ["ml-100k"], ["ego"], 1)
    for cell in result:
        build_components(cell.config)
        assert (cell.config.split.kind, cell.config.split.min_user) == ("random", 20)
        assert cell.config.evaluate.unmasked
    assert {"popular", "tally"} <= {cell.variant for cell in result}
    assert {"ndcg@20", "unmasked ndcg@20"} <= set(experiment.metrics)


def test_tables_share_their_cells() -> None:
    keys: dict[str, dict[str, str]] = {}
    for name in FILES:
        experiment, settings = experiment_spec.load_experiment(name)
        keys[name] = {
            c.variant: c.key for c in experiment_spec.list_cells(experiment, settings, ["ml-100k"], ["ego"], 1)
        }
    three = keys["fedshare/table3"]
    for name, own in {"table4": "contrast", "figure4": "fru"}.items():
        assert keys[f"fedshare/{name}"][own] == three[own]
    figure = keys["fedshare/figure5"]
    assert (figure["a_fedshare_1_2_7"], figure["d_fru_03"]) == (three["fedshare"], three["fru"])
    assert len({*figure.values()}) > len(figure) // 2


# the search


def tuned_table() -> experiment_spec.Experiment:
    searched = {
        "datasets": [SMALL],
        "seed": 100,
        "rounds": 2,
        "lowest": 0.01,
        "highest": 0.1,
        "first": [
            {"option": "aggregation", "of": ["train"], "choices": ["weighted", "per-row"]},
            {"option": "bpr_scale", "of": ["train", "shared-graph", "server-client"], "choices": [1.0, 5.0]},
        ],
        "then": [
            {"option": "lr", "of": ["backbone"], "lowest": 0.01, "highest": 0.1},
            {"option": "lr", "of": ["shared-graph", "server-client"], "lowest": 0.001, "highest": 0.1},
            {"option": "lam1", "of": ["shared-graph"], "choices": [0.1, 0.7]},
        ],
    }
    variants = {k: v for k, v in VARIANTS.items() if k in ("popular", "tally", "fedshare", "retrain", "contrast")}
    train = {"rounds": 4, "participation": {"kind": "fraction", "rate": 0.5}}
    more = variant("FedAvg", "fedshare-fedavg")
    return small_table(tune=searched, train=train, variants={**variants, "fedavg": more}, baseline="")


def test_every_learning_method_has_the_same_search_budget() -> None:
    experiment = tuned_table()
    entries = {entry.source: entry for entry in learning_rates.list_tuning_entries(experiment, [], 7)}
    assert entries.keys() == {"fedshare", "fedshare-fedavg"}
    ours = entries["fedshare"]
    assert [(t.train["aggregation"], t.options["shared-graph"]["bpr_scale"]) for t in ours.trials] == [
        ("weighted", 1.0), ("weighted", 5.0), ("per-row", 1.0), ("per-row", 5.0)
    ]  # fmt: skip
    scores = {cell.key: {"valid": 0.1} for entry in entries.values() for cell in entry.cells}
    scores[ours.cells[3].key] = {"valid": 0.3}
    scores[entries["fedshare-fedavg"].cells[0].key] = {"failed": "diverged."}
    wider = {
        entry.source: entry for entry in learning_rates.add_second_step(experiment, list(entries.values()), scores, 7)
    }
    assert {len(entry.cells) for entry in wider.values()} == {7}
    for trial, cell in zip(wider["fedshare"].trials[4:], wider["fedshare"].cells[4:], strict=True):
        assert trial.train == {"aggregation": "per-row", "bpr_scale": 5.0}
        backbone, parts, _ = build_components(cell.config)
        graph = next(part for part in parts if part.name == "shared-graph")
        assert cell.config.train.bpr_scale == graph.config.bpr_scale == 5.0
        assert (backbone.config.lr, graph.config.lr) == (trial.lr, trial.options["shared-graph"]["lr"])
        assert 0.01 <= trial.lr <= 0.1
        assert graph.config.lam1 in (0.1, 0.7)
        assert (cell.config.seed, cell.config.train.rounds, cell.kind) == (100, 2, "once, tried")
    assert all("lam1" not in t.options["server-client"] for t in wider["fedshare-fedavg"].trials)
    best = learning_rates.choose_rates(
        wider["fedshare"], scores | {c.key: {"valid": 0.2} for c in wider["fedshare"].cells[4:]}
    )
    settings = experiment_spec.Settings(chosen={SMALL: {"ego": {"fedshare": best}}})
    by = {c.variant: c.config for c in experiment_spec.list_cells(experiment, settings, [SMALL], ["ego"], 1)}
    for name in ("fedshare", "retrain", "contrast"):
        assert (by[name].train.aggregation, by[name].train.bpr_scale) == ("per-row", 5.0)
    assert by["fedavg"].train.aggregation == "weighted"


def test_a_method_without_a_score_in_the_first_step_has_no_second() -> None:
    experiment = tuned_table()
    entries = learning_rates.list_tuning_entries(experiment, ["fedavg"], 7)
    failed = {cell.key: {"failed": "diverged."} for cell in entries[0].cells}
    assert learning_rates.add_second_step(experiment, entries, failed, 7) == entries


def test_points_of_the_search_stay_inside_and_apart() -> None:
    for dimensions in (3, 4, 5):
        points = np.array(low_discrepancy.spread_points(20, dimensions))
        assert points.shape == (20, dimensions)
        assert ((points >= 0) & (points < 1)).all()
        apart = np.linalg.norm(points[:, None] - points[None], axis=2) + 9 * np.eye(20)
        assert apart.min() > 0.1
    axis = experiment_spec.Axis(option="lr", of=["backbone"], lowest=0.01, highest=1.0)
    assert [axes._read_value_at(axis, share) for share in (0.0, 0.5)] == [0.01, 0.1]


def test_no_seed_of_the_tables_is_tuned_on() -> None:
    experiment = experiment_spec.load_main_table("fedshare")
    assert experiment.tune
    assert experiment.tune.seed not in range(experiment.seeds + 1)
    sources: Iterator[str] = (entry.source for entry in learning_rates.list_tuning_entries(experiment, ["ml-1m"], 12))
    assert sorted(sources) == ["cdcgnnfed", "fedshare", "fedshare-decoupled", "fedshare-fedavg", "pdc-frs"]
