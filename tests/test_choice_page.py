"""The page "Which should I use?": every preset is in it, forgetting has the price of its way, advice is of cells."""

from __future__ import annotations

import numpy as np
import pytest

from tacita.core.config import EvaluateConfig, RunConfig, SplitConfig, TrainConfig
from tacita.methods import list_preset_names, resolve_config
from tacita.research.experiments import experiment_spec
from tacita.research.experiments.choice_measures import describe_promise, measure_choice
from tacita.research.experiments.choice_page import render_choice_page
from tacita.runs.assembly import Machine, assemble_federation, build_plan
from tacita.runs.server_view import SHARES, SUM_ALONE, describe_server_view

TINY = "synthetic:users=60,items=60,per_user=15,groups=4"


def test_every_preset_is_compared_and_can_be_configured() -> None:
    experiment, settings = experiment_spec.load_experiment("choose")
    assert {variant.method for variant in experiment.variants.values()} == set(list_preset_names())
    cells = experiment_spec.list_cells(experiment, settings, ["ml-100k"], experiment.backbones, 1)
    assert len(cells) == len(experiment.variants)  # each with one model


def test_rates_of_each_paper_hold_for_its_own_methods() -> None:
    _, settings = experiment_spec.load_experiment("choose")
    alone = experiment_spec.load_settings("f3crec")
    assert settings.find_choice("ml-100k", "mf", "f3crec").lr == alone.lr["ml-100k"]["mf"]
    assert settings.find_choice("ml-100k", "mf", "fedrec").lr is None  # a rate is nobody else's
    assert settings.find_choice("ml-1m", "ego", "fedshare").lr is not None


def told(method: str, backbone: str, **privacy: float) -> dict[str, object]:
    config = resolve_config(
        {
            "data": TINY,
            "method": method,
            "backbone": {"name": backbone},
            "split": SplitConfig(kind="leave-one-out", k_core=0).model_dump(),
            "train": TrainConfig(rounds=2).model_dump(include={"rounds"}),
            "evaluate": EvaluateConfig(controls=False, k=[10], select_by="ndcg@10").model_dump(),
            **({"privacy": privacy} if privacy else {}),
        },
        "here",
    )
    assert isinstance(config, RunConfig)
    return measure_choice(assemble_federation(config, Machine(threads=1)))


@pytest.mark.parametrize(
    ("method", "backbone", "forgets", "sees"),
    [
        ("fedavg", "tally", "tally: exact", "gives people away"),
        ("fedavg", "tally-order", "tally-order: exact", "what follows what"),
        ("fedavg", "mf", "trains again: exact", "which rows"),
        ("fedshare", "ego", "contrastive-unlearning: not exact", "what the person shares"),
        ("fedkdrec", "neumf", "trains again: exact", "scores"),
    ],
)
def test_page_states_what_forgetting_costs_for_a_run(method: str, backbone: str, forgets: str, sees: str) -> None:
    line = told(method, backbone)
    words, values = line["words"], line["values"]
    assert isinstance(words, dict)
    assert isinstance(values, dict)
    assert words["forgets"].startswith(forgets)
    assert sees in words["sees"]
    assert values["forgetting, CPU seconds"][0] > 0
    assert "epsilon" not in values


def test_page_states_the_budget() -> None:
    line = told("fedavg", "tally", epsilon=4.0)
    assert line["values"]["epsilon"] == [4.0]  # type: ignore[index]
    assert "with noise" in line["words"]["sees"]  # type: ignore[index]
    assert "not exact" in line["words"]["forgets"]  # type: ignore[index]
    assert line["words"]["promise"] == "a person, from who sees the sum"  # type: ignore[index]


SEES = {"fedmf_he": SUM_ALONE, "fedshare": f"{SHARES}; which rows each person's update moves"}


def page_of(quality: dict[str, float], seeds: int = 2, **forgets: str) -> str:
    experiment, settings = experiment_spec.load_experiment("choose")
    cells = experiment_spec.list_cells(experiment, settings, ["ml-100k"], ["tally", "mf", "ego"], seeds, list(quality))
    lines = {}
    for cell in cells:
        if np.isnan(quality[cell.variant]):
            lines[cell.key] = {"seed": cell.seed, "failed": "training diverged."}
            continue
        sent = 100.0 + 10 * len(cell.variant)
        values = {"ndcg@10": [quality[cell.variant] + 0.001 * cell.seed], "hr@10": [0.1], "KB up, a person": [sent]}
        if cell.variant == "tally_private_8":
            values["epsilon"] = [8.0]
        words = {
            "forgets": forgets.get(cell.variant, "tally: exact"),
            "sees": SEES.get(cell.variant, "a sum"),
            "promise": "a person",
        }
        lines[cell.key] = {"seed": cell.seed, "values": values, "words": words}
    return render_choice_page(experiment, cells, lines)


def test_advice_follows_from_the_cells() -> None:
    page = page_of({"popular": 0.05, "tally": 0.09, "tally_private_8": 0.06, "fedavg": 0.04})
    assert "may know the histories: on ml-100k **tally** (NDCG@10 0.0915 ± 0.0064" in page
    assert (
        "an epsilon below 10: on ml-100k **tally, epsilon 8** (NDCG@10 0.0615 ± 0.0064, epsilon 8, a person: " in page
    )
    assert "took part may be 97% sure after, a weak promise ([privacy.md](privacy.md)))" in page
    assert "Below most popular (0.0515 ± 0.0064) on ml-100k: fedavg." in page
    assert (
        "wanted: on ml-100k **tally** (NDCG@10 0.0915 ± 0.0064, 150 KB up)" in page
    )  # fedavg sends more, and is below
    assert "seen by itself" not in page
    page = page_of({"popular": 0.05, "tally": 0.09, "fedmf_he": 0.06, "fedshare": 0.055})
    assert "seen by itself, and no budget is needed: on ml-100k **fedmf-he** (" in page
    assert "what they share and take it back: on ml-100k **fedshare** (" in page


def test_tables_are_grouped_best_first_and_name_missing_cells() -> None:
    quality = {"tally": 0.08, "tally_uncut": 0.09, "popular": 0.05, "fedavg": 0.04, "fedmf_he": 0.06, "fedrec": np.nan}
    page = page_of(quality, fedavg="trains again: exact", fedmf_he="fru: not exact")
    titles = [row.strip("*") for row in page.splitlines() if row.startswith("**")]
    assert titles == ["One exchange", "Rounds of training"]
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("| ") and "NDCG@10" not in row]
    assert [row[0].strip("| ").split(" (")[0] for row in rows] == [
        "tally, uncut", "tally", "most popular", "fedmf-he", "fedavg"
    ]  # fmt: skip
    assert rows[3][7].startswith("not exact (fru)")
    assert rows[4][7].startswith("train again, exact")
    assert "fedrec failed: training diverged." in page


def test_the_same_run_under_another_name_stands_in_one_row() -> None:
    experiment, settings = experiment_spec.load_experiment("choose")
    cells = experiment_spec.list_cells(experiment, settings, ["ml-100k"], ["mf"], 2, ["fedavg", "reg", "f3crec", "kd"])
    lines = {
        cell.key: {
            "seed": cell.seed,
            "values": {"ndcg@10": [0.05 if cell.variant != "kd" else 0.06], "hr@10": [0.1], "KB up, a person": [7.0]},
            "words": {"forgets": "trains again: exact", "sees": "updates"},
        }
        for cell in cells
        if (cell.variant, cell.seed) != ("f3crec", 2)
    }
    page = render_choice_page(experiment, cells, lines)
    assert "| fedavg (2 seeds); the same run: reg |" in page
    assert "| kd (2 seeds) |" in page
    assert "Not run, or not all of it: f3crec (1 of 2 seeds)." in page


def test_largest_epsilon_names_its_privacy_unit() -> None:
    message = {"noise": {"unit": "person", "threat": "local", "epsilon_of_a_release": 1.0}}
    assert describe_promise(
        {"promises": {**message, "dpps": {"unit": "silo", "threat": "central", "epsilon_most": 5.0}}}
    ) == ("a silo, from who gets the model")
    assert describe_promise({"promises": message}) == "a person, from the server"
    assert describe_promise({}) == ""


def test_one_dataset_may_have_fewer_seeds() -> None:
    experiment, settings = experiment_spec.load_experiment("choose")
    cells = experiment_spec.list_cells(experiment, settings, ["ml-100k", "ml-1m"], ["tally"], 3, ["tally"])
    assert [(cell.dataset, cell.seed) for cell in cells] == [
        ("ml-100k", 1),
        ("ml-1m", 1),
        ("ml-100k", 2),
        ("ml-100k", 3),
    ]


def sees(method: str, backbone: str = "mf", **more: object) -> str:
    return describe_server_view(
        build_plan(resolve_config({"data": TINY, "method": method, "backbone": {"name": backbone}, **more}, "x"))
    )


def test_server_visibility_follows_the_trust_model() -> None:
    fixed, apart = {"aggregation": "fixed"}, {"aggregation": "fixed", "silos": 4, "in_silos": "apart"}
    threat = {name: [{"name": "dpps", "threat": name}] for name in ("local", "silo", "central")}
    noisy_values, clipped = "each person's update, with noise", "each person's clipped update; the model"
    assert sees("dpps", parts=threat["local"], train={"aggregation": "mean"}).startswith(noisy_values)
    assert sees("dpps", parts=threat["central"], train=fixed).startswith(clipped)
    assert sees("dp-fedavg").startswith(clipped)
    assert sees("dpps", parts=threat["silo"], train=apart).startswith(
        "each silo's sum of clipped updates, with one noise"
    )
    assert sees("dpps", "tally").endswith("with noise")


def test_promise_is_stated_for_every_threat_model() -> None:
    for threat in ("local", "silo", "central"):
        promised = {"dpps": {"epsilon_most": 1.0, "unit": "person", "threat": threat}}
        assert describe_promise({"promises": promised}).startswith("a person, from ")


def test_advice_depends_on_what_the_server_sees() -> None:
    assert sees("fedmf-he").startswith(SUM_ALONE)
    assert sees("fedshare", "ego").startswith(SHARES)
