"""Paper tables: the files are sound, cells are found once and kept, verdicts and tests say what they should."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from tacita.cli import main
from tacita.core.config import EvaluateConfig, RunConfig, SplitConfig, TrainConfig
from tacita.core.errors import TacitaError
from tacita.federation.rounds import Progress, make_initial_progress, run_remaining_blocks
from tacita.methods import find_part_class, list_preset_parts
from tacita.metrics import compute_confidence_interval
from tacita.models import list_backbones
from tacita.models.tally.model import TallyConfig
from tacita.research.experiments import (
    analyses,
    cells,
    comparisons,
    experiment_cell,
    experiment_spec,
    learning_rates,
    low_discrepancy,
    paper_tuning,
    reproduction,
    schedules,
    single_block,
    table_html,
    table_markdown,
    tables,
    tuning,
)
from tacita.research.experiments.shared_base import continue_run, train_base, with_parts
from tacita.research.experiments.workers import Workers
from tacita.round.plan import Federation
from tacita.runs.assembly import Machine, assemble_federation, build_components
from tacita.runs.serving import open_run

TINY = "synthetic:users=60,items=60,per_user=15,groups=4,drift=0.3,new=0.2"


def tiny_config(method: str = "ft", seed: int = 1, **parts: Any) -> RunConfig:
    specs = [{**spec, **parts.get(spec["name"].replace("-", "_"), {})} for spec in list_preset_parts(method)]
    return RunConfig(
        data=TINY,
        method=method,
        parts=specs,
        backbone={"name": "mf", "dim": 8, "lr": 0.3},
        seed=seed,
        split=SplitConfig(n_blocks=3),
        train=TrainConfig(rounds=3),
        evaluate=EvaluateConfig(controls=False),
    )


@pytest.fixture(scope="module")
def tiny() -> tuple[Federation, Progress]:
    fed = assemble_federation(tiny_config(), Machine(threads=1))
    return fed, train_base(fed)


# the files


@pytest.mark.parametrize("name", experiment_spec.list_experiments())
def test_every_experiment_file_loads_and_names_what_exists(name: str) -> None:
    experiment, settings = experiment_spec.load_experiment(name)
    for cell in experiment_spec.list_cells(experiment, settings, experiment.datasets, experiment.backbones, 1):
        assert cell.backbone in list_backbones()
        for spec in cell.config.parts or []:
            find_part_class(spec["name"]).Config(**{k: v for k, v in spec.items() if k != "name"})
    for dataset, by_backbone in experiment.published.items():
        assert dataset in experiment.datasets
        for backbone, by_metric in by_backbone.items():
            assert backbone in experiment.backbones
            for metric, by_variant in by_metric.items():
                assert metric in experiment.metrics
                assert by_variant.keys() <= experiment.variants.keys()
                assert all(len(row) == len(experiment.published_columns) for row in by_variant.values())


def test_the_tuning_space_names_options_that_exist() -> None:
    for part, options in tuning.make_search_space()["parts"].items():
        assert options.keys() <= find_part_class(part).Config.model_fields.keys()
        for option, choices in options.items():
            for value in choices:
                find_part_class(part).Config(**{option: value})


def test_an_unknown_table_and_an_unknown_restriction_are_refused() -> None:
    with pytest.raises(TacitaError, match="did you mean 'f3crec/table2'"):
        experiment_spec.load_experiment("f3crec/tabel2")
    experiment, _ = experiment_spec.load_experiment("f3crec/table2")
    with pytest.raises(TacitaError, match="did you mean 'ml-100k'"):
        experiment_spec.narrow_experiment(experiment, ["ml-100"])


def test_tables_that_ask_for_the_same_run_share_its_cell() -> None:
    keys = []
    for name in ("f3crec/table2", "f3crec/table3"):
        experiment, settings = experiment_spec.load_experiment(name)
        result = experiment_spec.list_cells(experiment, settings, ["ml-100k"], ["mf"], 1)
        keys.append({c.variant: c.key for c in result})
    assert keys[0]["f3crec"] == keys[1]["f3crec"]
    assert keys[0]["ft"] == keys[1]["ft"]
    assert len(set(keys[0].values())) == len(keys[0])


COMMITTED = Path(__file__).parent.parent / "docs" / "reproduction" / "cells"


def test_later_settings_do_not_orphan_the_finished_cells() -> None:
    experiment, settings = experiment_spec.load_experiment("f3crec/table2")
    wanted = experiment_spec.list_cells(experiment, settings, experiment.datasets, experiment.backbones, 1)
    result = cells.CellFile(COMMITTED, "f3crec").read(wanted)
    assert len(wanted) == 54
    assert {c.key for c in wanted} <= result.keys()
    other = wanted[0].config.model_copy(update={"evaluate": EvaluateConfig(controls=False, hidden_items="count")})
    assert replace(wanted[0], config=other).key not in result


def test_a_variant_may_have_a_split_and_an_evaluation_of_its_own() -> None:
    bases = set()
    for name, hidden in (("table2", "drop"), ("lastfm_repeats_drop", "drop"), ("lastfm_repeats", "count")):
        experiment, settings = experiment_spec.load_experiment(f"f3crec/{name}")
        configs = [c.config for c in experiment_spec.list_cells(experiment, settings, ["lastfm-2k"], ["mf"], 1)]
        assert {c.split.repeats for c in configs} == {"once" if name == "table2" else "keep"}
        assert {c.evaluate.hidden_items for c in configs} == {hidden}
        assert all(c.split.seed == c.seed and not c.evaluate.controls for c in configs)
        bases |= {cells._digest_base(c) for c in configs}
    assert len(bases) == 3
    wrong = experiment_spec.Variant(label="x", method="ft", evaluate={"hidden_item": "count"})
    with pytest.raises(TacitaError, match="did you mean 'hidden_items'"):
        experiment_spec.build_run_config(experiment, settings, "lastfm-2k", "mf", wrong, 1)


# shared block 0


@pytest.mark.parametrize("method", ["ft", "f3crec", "reg", "spp", "rlp2"])
def test_going_on_from_a_shared_block_0_equals_a_run_of_its_own(tiny: tuple[Federation, Progress], method: str) -> None:
    fed, base = tiny
    config = tiny_config(method, replay={"top_n": 5})
    shared = continue_run(with_parts(fed, config), base)
    alone_fed = assemble_federation(config, Machine(threads=1))
    alone = make_initial_progress(alone_fed)
    run_remaining_blocks(alone_fed, alone, lambda report, now: None)
    assert shared.results == alone.results


# cells


def some_cells(variants: dict[str, str], seeds: int) -> list[experiment_cell.ExperimentCell]:
    return [
        experiment_cell.ExperimentCell("tiny", "mf", name, seed, tiny_config(method, seed, replay={"top_n": 5}))
        for seed in range(1, seeds + 1)
        for name, method in variants.items()
    ]


def test_finished_cells_are_kept_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell_file = cells.CellFile(tmp_path, "paper")
    wanted = some_cells({"ft": "ft", "kd": "kd"}, 1)
    first = cells.run_cells(wanted[:1], cell_file, None, workers=Workers(1))
    ran: list[str] = []
    real = cells.run_job

    def spy(job: cells.CellJob) -> list[single_block.Line]:
        ran.extend(c.variant for c in job.cells)
        return real(job)

    monkeypatch.setattr(cells, "run_job", spy)
    both = cells.run_cells(wanted, cell_file, None, workers=Workers(1))
    assert ran == ["kd"]
    assert both[wanted[0].key] == first[wanted[0].key]
    assert cells.run_cells(wanted, cell_file, None, workers=Workers(1)).keys() == both.keys()
    assert ran == ["kd"]


def test_a_damaged_cell_file_is_named_with_its_line(tmp_path: Path) -> None:
    cell_file = cells.CellFile(tmp_path, "paper")
    wanted = some_cells({"ft": "ft"}, 1)
    (tmp_path / "paper-tiny-mf.jsonl").write_text('{"key": "x"}\n{"key": \n')
    with pytest.raises(TacitaError, match="line 2"):
        cell_file.read(wanted)


def test_truncated_line_is_treated_as_missing(tmp_path: Path) -> None:
    cell_file = cells.CellFile(tmp_path, "paper")
    wanted = some_cells({"ft": "ft"}, 1)
    path = tmp_path / "paper-tiny-mf.jsonl"
    unfinished = '{"key": "x"}\n{"key": "y", "da'
    path.write_text(unfinished)
    assert cell_file.read(wanted).keys() == {"x"}
    assert path.read_text() == unfinished  # another process may be writing it
    cell_file.append_lines([{"key": "z", "dataset": "tiny", "backbone": "mf"}])
    assert cell_file.read(wanted).keys() == {"x", "z"}


def test_diverged_run_is_recorded_as_a_result(tmp_path: Path) -> None:
    config = tiny_config()
    config = config.model_copy(update={"parts": [{"name": "replay", "eps": 0.0, "weight": 1e30, "top_n": 5}]})
    wanted = [experiment_cell.ExperimentCell("tiny", "mf", "bad", 1, config)]
    lines = cells.run_cells(wanted, cells.CellFile(tmp_path, "paper"), None, workers=Workers(1))
    assert "diverged" in lines[wanted[0].key]["failed"]
    assert "seed 1" in tables.list_failed_cells(wanted, lines)[0]


def test_per_user_scores_survive_packing_to_three_digits() -> None:
    values = np.random.default_rng(0).random(500)
    assert np.abs(single_block.unpack_scores(single_block.pack_scores(values)) - values).max() < 5e-4


# tables


def test_interval_is_the_t_interval_by_hand() -> None:
    mean, half = compute_confidence_interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.302653 * 1.0 / math.sqrt(3), rel=1e-5)
    assert math.isnan(compute_confidence_interval([1.0])[1])


@pytest.mark.parametrize(
    ("mean", "half", "published", "expected"),
    [
        (0.10, 0.012, 0.111, "unclear"),  # inside the interval, but the interval is wide
        (0.10, 0.009, 0.108, "agrees"),  # inside the interval
        (0.10, 0.001, 0.105, "agrees"),  # within the tolerance
        (0.10, 0.001, 0.080, "higher"),
        (0.10, 0.001, 0.130, "lower"),
        (0.10, float("nan"), 0.130, "unclear"),  # one seed
        (0.10, 0.02, None, ""),
    ],
)
def test_verdicts(mean: float, half: float, published: float | None, expected: str) -> None:
    assert tables.judge_agreement(mean, half, published, 0.1) == expected


def fabricated() -> tuple[
    experiment_spec.Experiment, list[experiment_cell.ExperimentCell], dict[str, single_block.Line]
]:
    """Two methods, three seeds; method b is 0.01 better for every user, with a little noise."""
    experiment = experiment_spec.Experiment(
        title="A <table>",
        datasets=["tiny"],
        backbones=["mf"],
        variants={
            "a": experiment_spec.Variant(label="A", method="ft"),
            "b": experiment_spec.Variant(label="B", method="kd"),
        },
        seeds=3,
        metrics=["ndcg@20"],
        compare=["b"],
        quick=experiment_spec.Scope(datasets=["tiny"], backbones=["mf"], seeds=1),
        published={"tiny": {"mf": {"ndcg@20": {"a": [0.1, 0.2], "b": [0.3, None]}}}},
        published_columns=["D1", "D2"],
    )
    wanted = some_cells({"a": "ft", "b": "kd"}, 3)
    rng = np.random.default_rng(1)
    lines = {}
    for cell in wanted:
        lift = 0.01 if cell.variant == "b" else 0.0
        users = np.linspace(0.05, 0.15, 50) + lift + rng.normal(0, 0.001, 50)
        d1 = 0.1 + lift + 0.001 * cell.seed
        lines[cell.key] = {"values": {"ndcg@20": [d1, 0.2, (d1 + 0.2) / 2]}, "users": single_block.pack_scores(users)}
    return experiment, wanted, lines


def test_entries_hold_means_published_values_and_verdicts() -> None:
    experiment, wanted, lines = fabricated()
    results = {(e.variant, e.column): e for e in tables.build_entries(experiment, wanted, lines)}
    assert results["a", "D1"].mean == pytest.approx(0.102)
    assert results["a", "D1"].verdict == "agrees"
    assert results["b", "D1"].verdict == "lower"
    assert results["a", "mean"].published == pytest.approx(0.15)
    assert results["b", "mean"].published is None  # one block was not published


def test_the_paired_test_sees_a_small_lift_for_everybody() -> None:
    experiment, wanted, lines = fabricated()
    (test,) = comparisons.compare_variants(experiment, wanted, lines)
    assert (test.variant, test.against, test.pairs) == ("b", "a", 50)
    assert test.gain == pytest.approx(0.1, rel=0.05)
    assert test.p < 1e-6


def test_seeds_that_tested_different_people_are_not_paired() -> None:
    experiment, wanted, lines = fabricated()
    entry = lines[wanted[0].key]
    entry["users"] = single_block.pack_scores(single_block.unpack_scores(entry["users"])[:-3])
    assert comparisons.compare_variants(experiment, wanted, lines) == []


def test_a_variant_may_have_backbones_of_its_own_and_is_compared_across() -> None:
    experiment, settings = experiment_spec.load_experiment("f3crec/tally")
    result = experiment_spec.list_cells(experiment, settings, ["ml-100k"], ["mf", "tally"], 1)
    assert {c.variant for c in result if c.backbone == "tally"} == {"tally", "open"}
    assert {c.variant for c in result if c.backbone == "mf"} == {"ft", "reg", "kd", "rlp2", "spp", "f3crec"}
    table2 = experiment_spec.list_cells(*experiment_spec.load_experiment("f3crec/table2"), ["ml-100k"], ["mf"], 1)
    assert {c.key for c in table2} == {c.key for c in result if c.backbone == "mf"}
    level = {"ft": 0.1, "f3crec": 0.11, "tally": 0.13, "open": 0.14}
    lines = {
        c.key: {"users": single_block.pack_scores(np.arange(4.0) ** 2 * level.get(c.variant, 0.05))} for c in result
    }
    tests = comparisons.compare_variants(experiment, result, lines)
    assert {(t.variant, t.describe_other({"f3crec": "F3CRec"})) for t in tests} == {
        ("tally", "F3CRec (mf)"),
        ("open", "F3CRec (mf)"),
    }


def test_the_written_settings_of_tally_are_its_defaults() -> None:
    experiment, _ = experiment_spec.load_experiment("f3crec/tally")
    own = TallyConfig()
    assert TallyConfig(**experiment.variants["tally"].backbone) == own
    free = own.model_copy(update={"min_item": 0, "min_pair": 0, "keep": 0})
    assert TallyConfig(**experiment.variants["open"].backbone) == free


def test_pages_name_every_cell_and_escape_titles() -> None:
    experiment, wanted, lines = fabricated()
    entries = tables.build_entries(experiment, wanted, lines)
    tests = comparisons.compare_variants(experiment, wanted, lines)
    text = table_markdown.to_markdown(experiment, entries, tests, ["tiny failed"])
    assert "0.1020 ± " in text
    assert "(0.3000 lower)" in text
    assert "- tiny failed" in text
    page = table_html.render_html(experiment, entries, tests)
    assert "A &lt;table&gt;" in page
    for entry in entries:
        assert f"{entry.mean:.4f}" in page
        if entry.published is not None:
            assert f'<small class="{entry.verdict}">{entry.published:.4f} {entry.verdict}</small>' in page
    rows = tables.to_csv(entries).splitlines()
    assert len(rows) == 1 + len(entries)
    assert tables.count_verdicts(entries) == {"agrees": 3, "higher": 0, "lower": 1, "unclear": 0}


# a whole table


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A paper of one table, two columns on one small dataset, where papers are looked for."""
    table = {
        "title": "Tiny",
        "datasets": [TINY],
        "backbones": ["mf"],
        "variants": {"a": {"label": "A", "method": "ft"}, "b": {"label": "B", "method": "reg", "settings_of": "ft"}},
        "seeds": 2,
        "rounds": {TINY: 2},
        "published": {TINY: {"mf": {"ndcg@20": {"a": [9.0, 9.0, 9.0]}}}},
        "quick": {"datasets": [TINY], "backbones": ["mf"], "seeds": 1},
    }
    monkeypatch.setattr(experiment_spec, "ROOT", tmp_path / "papers")
    (tmp_path / "papers" / "mine").mkdir(parents=True)
    (tmp_path / "papers" / "mine" / "table2.toml").write_text(tomli_w.dumps(table))
    return tmp_path


@pytest.mark.parametrize(
    ("only", "seeds", "quick", "n_cells", "stem"),
    [
        ([], None, False, 4, "table2"),
        ([], 5, False, 10, "table2"),
        ([], 1, False, 2, "table2-part"),
        (["mf"], None, False, 4, "table2-mf"),
        ([], None, True, 2, "table2-quick"),
        ([], 3, True, 6, "table2-quick"),
    ],
)
def test_a_part_of_a_table_has_a_file_of_its_own(
    paper: Path, only: list[str], seeds: int | None, quick: bool, n_cells: int, stem: str
) -> None:
    wanted = reproduction.plan_table("mine/table2", only, seeds, quick)
    assert (len(wanted.cells), wanted.paper, wanted.stem) == (n_cells, "mine", stem)


def test_quick_and_only_exclude_each_other(paper: Path) -> None:
    with pytest.raises(TacitaError, match="leave out --only"):
        reproduction.plan_table("mine/table2", ["mf"], None, quick=True)


def test_table_is_written_and_printed_and_cells_run_once(
    paper: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report: list[tuple[int, int]] = []
    wanted = reproduction.plan_table("mine/table2", [], None, quick=True)
    result = reproduction.reproduce_table(
        wanted, paper / "out", workers=Workers(1), on_done=lambda done, total: report.append((done, total))
    )
    assert (report[0], report[-1]) == ((0, 2), (2, 2))
    assert {entry.variant for entry in result.entries} == {"a", "b"}
    assert result.path == paper / "out" / "mine" / "table2-quick"
    assert sorted(entry.name for entry in result.path.parent.iterdir()) == [
        f"table2-quick.{s}" for s in ("csv", "html", "md")
    ]
    monkeypatch.setattr(cells, "run_job", lambda job: pytest.fail("the cells are finished"))
    with pytest.raises(SystemExit) as error:
        main(["reproduce", "mine/table2", "--quick", "--out", str(paper / "out"), "--json"])
    assert not error.value.code
    assert [load["mean"] for load in json.loads(capsys.readouterr().out)] == [entry.mean for entry in result.entries]
    with pytest.raises(SystemExit):
        main(["reproduce", "mine/table2", "--quick", "--out", str(paper / "out"), "--quiet"])
    out, err = capsys.readouterr()
    assert out.startswith("Tiny")
    assert "unclear: one seed has no interval" in err
    assert err.endswith(f"against the paper: 4 unclear; wrote {result.path}.md, .csv and .html\n")


def test_a_paper_is_tuned_on_each_dataset_and_backbone_with_methods_of_their_own(paper: Path) -> None:
    [job] = paper_tuning.list_paper_jobs("mine", [], 7, tuning.StudyPlace(paper / "study"), None)
    assert (job.dataset, job.backbone, job.methods, job.rounds, job.trials) == (TINY, "mf", ("ft",), 2, 7)


def test_tuned_settings_are_stored_with_the_tables(paper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "make_search_space", lambda: {"parts": {}, "backbones": {"mf": {"lr": [1e30, 0.5]}}})
    report: list[tuple[int, int]] = []
    jobs = paper_tuning.list_paper_jobs("mine", [], 3, tuning.StudyPlace(paper / "study"), None)
    results = paper / "results"
    (paper / "papers" / "mine").chmod(0o500)  # an installed package is nobody's to write
    path, failed = paper_tuning.tune_paper("mine", jobs, results, lambda done, total: report.append((done, total)))
    assert (path, report) == (results / "mine" / "settings.toml", [(0, 1), (1, 1)])
    assert [entry.name for entry in (paper / "papers" / "mine").iterdir()] == ["table2.toml"]
    assert [entry.startswith(f"{TINY}, mf, learning rate 1e+30: ") for entry in failed] == [True]
    stored = experiment_spec.load_settings("mine", results)
    assert stored.lr == {TINY: {"mf": 0.5}}
    assert stored.chosen[TINY]["mf"]["ft"].trials == 1
    assert (
        experiment_spec.load_settings("mine")
        == experiment_spec.load_settings("mine", paper / "elsewhere")
        == experiment_spec.Settings()
    )
    tuned = reproduction.plan_table("mine/table2", [], 1, quick=False, results=results)
    assert {cell.config.backbone["lr"] for cell in tuned.cells} == {0.5}
    (paper / "papers" / "mine").chmod(0o700)
    path.rename(paper / "papers" / "mine" / "settings.toml")  # for everybody: the same cells from the package
    moved = reproduction.plan_table("mine/table2", [], 1, quick=False, results=results)
    assert [cell.key for cell in moved.cells] == [cell.key for cell in tuned.cells]


WITH_PAGES = [name for name in experiment_spec.list_experiments() if (COMMITTED.parent / f"{name}.md").is_file()]


def test_every_table_of_f3crec_has_its_page() -> None:
    assert {name for name in experiment_spec.list_experiments() if name.startswith("f3crec/")} <= set(WITH_PAGES)


@pytest.mark.parametrize("name", WITH_PAGES)
def test_the_committed_pages_follow_from_the_committed_cells(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_none(workers: Workers, work: object, jobs: list[cells.CellJob]) -> list[list[single_block.Line]]:
        assert jobs == [], "a cell is missing"
        return []

    monkeypatch.setattr(Workers, "run", run_none)
    (tmp_path / "cells").symlink_to(COMMITTED)
    result = reproduction.reproduce_table(reproduction.plan_table(name, [], None, quick=False), tmp_path)
    for suffix in ("md", "csv", "html"):
        page = f"{name}.{suffix}"
        assert result.path.with_name(f"{result.path.name}.{suffix}") == tmp_path / page
        assert (tmp_path / page).read_text() == (COMMITTED.parent / page).read_text()


# analyses


def test_quintiles_are_the_ends_of_the_order() -> None:
    low, high = analyses.find_extreme_fifths(np.array([5.0, 1, 4, 2, 3, 9, 8, 7, 6, 0]))
    assert low.tolist() == [9, 1]
    assert high.tolist() == [6, 5]


def test_forgetting_is_nothing_for_a_model_that_does_not_move(tiny: tuple[Federation, Progress]) -> None:
    _, base = tiny
    config = tiny_config("ft").model_copy(update={"backbone": {"name": "mf", "dim": 8, "lr": 1e-12}})
    frozen = assemble_federation(config, Machine(threads=1))
    forgetting = analyses.measure_forgetting(replace(with_parts(frozen, config), parts=()), base)
    assert forgetting["values"]["degradation"] == pytest.approx([0.0, 0.0], abs=1e-6)


def test_rank_changes_are_larger_for_items_that_moved_more(tiny: tuple[Federation, Progress]) -> None:
    fed, base = tiny
    calm, lively, difference = analyses.measure_rank_changes(fed, base)["values"]["rank change"]
    assert lively > calm
    assert difference == pytest.approx(lively - calm, abs=1e-5)


# tuning


def test_a_study_goes_on_where_it_was_and_keeps_every_trial(
    tiny: tuple[Federation, Progress], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed, base = tiny
    space = {"parts": {"proximal": {"strength": [0.001, 0.01, 0.1, 1.0]}}, "backbones": {}}
    monkeypatch.setattr(tuning, "make_search_space", lambda: space)
    first = tuning.tune_method(fed, base, "reg", 2, tuning.StudyPlace(tmp_path))
    assert first.trials == 2
    ran: list[float] = []
    second = tuning.tune_method(fed, base, "reg", 4, tuning.StudyPlace(tmp_path), lambda n, score: ran.append(score))
    assert second.trials == 4
    assert len(ran) == 2
    assert second.valid >= first.valid
    trials = [open_run(p.parent).result["blocks"] for p in sorted(tmp_path.glob("*/trial-*/result.json"))]
    assert len(trials) == 4
    scores = [np.mean([b["valid_served"] for b in blocks[1:]]) for blocks in trials]
    assert max(scores) == pytest.approx(second.valid)


def test_a_trial_that_fails_is_a_sentence_and_never_a_score(
    tiny: tuple[Federation, Progress], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed, base = tiny
    space = {"parts": {"proximal": {"strength": [-1.0, 0.01, 0.1]}}, "backbones": {}}
    monkeypatch.setattr(tuning, "make_search_space", lambda: space)
    report: list[float | None] = []
    result = tuning.tune_method(fed, base, "reg", 3, tuning.StudyPlace(tmp_path), lambda n, score: report.append(score))
    assert result.trials == 3
    assert list(result.failed) == ['{"proximal": {"strength": -1.0}}']
    assert "strength" in result.failed['{"proximal": {"strength": -1.0}}']
    assert report.count(None) == 1
    assert 0.0 not in report
    assert len(list(result.folder.glob("trial-*/result.json"))) == 2
    ran: list[float | None] = []
    repeat = tuning.tune_method(fed, base, "reg", 3, tuning.StudyPlace(tmp_path), lambda n, score: ran.append(score))
    assert (repeat, ran) == (result, [])  # the reason is kept with the study
    space["parts"]["proximal"]["strength"] = [-1.0, -2.0]
    with pytest.raises(TacitaError, match=r"no trial of method 'reg' could be run: .*(-1\.0.*-2\.0|-2\.0.*-1\.0)"):
        tuning.tune_method(fed, base, "reg", 2, tuning.StudyPlace(tmp_path / "other"))


def test_a_method_without_options_is_one_trial_with_a_folder(tiny: tuple[Federation, Progress], tmp_path: Path) -> None:
    fed, base = tiny
    outcome = tuning.tune_method(fed, base, "fedavg", 5, tuning.StudyPlace(tmp_path))
    assert (outcome.trials, outcome.options, outcome.failed) == (1, {}, {})
    [only] = outcome.folder.glob("trial-*")
    assert outcome.valid == pytest.approx(np.mean([b["valid_served"] for b in open_run(only).result["blocks"][1:]]))


def test_a_learning_rate_that_fails_is_a_sentence_and_never_a_score(monkeypatch: pytest.MonkeyPatch) -> None:
    tried_rates = [1e30, 0.5]
    monkeypatch.setattr(tuning, "make_search_space", lambda: {"parts": {}, "backbones": {"mf": {"lr": tried_rates}}})
    config = RunConfig(data=TINY, backbone={"name": "mf"}, train=TrainConfig(rounds=3))
    base = tuning.tune_lr(config, Machine())
    assert base.lr == 0.5
    assert list(base.tried) == [0.5]
    assert list(base.failed) == [1e30]
    tried_rates.remove(0.5)
    with pytest.raises(TacitaError, match=r"could be trained with no learning rate: 1e\+30: "):
        tuning.tune_lr(config, Machine())


def test_tune_prints_every_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    space = {"parts": {"proximal": {"strength": [-1.0, 0.1]}}, "backbones": {"mf": {"lr": [1e30, 0.5]}}}
    monkeypatch.setattr(tuning, "make_search_space", lambda: space)
    message = {}
    for method in ("reg", "fedavg"):
        with pytest.raises(SystemExit) as error:
            main(["tune", "--data", TINY, "--method", method, "--trials", "4", "--out", str(tmp_path), "--quiet"])
        assert not error.value.code
        message[method], err = capsys.readouterr()
        assert len(list(Path(err.rpartition(": ")[2].strip()).glob("trial-*/result.json"))) == 1
    for words in ("learning rate 1e+30: no score, ", '{"strength": -1.0}}: no score, ', "after 2 trials"):
        assert words in message["reg"]
    assert "the one trial: method 'fedavg' has none to choose" in message["fedavg"]


def test_study_of_another_base_starts_over(tiny: tuple[Federation, Progress], tmp_path: Path) -> None:
    fed, base = tiny
    tuning.tune_method(fed, base, "reg", 1, tuning.StudyPlace(tmp_path))
    other = replace(fed, config=fed.config.model_copy(update={"seed": 9}))
    ran: list[float] = []
    tuning.tune_method(other, base, "reg", 1, tuning.StudyPlace(tmp_path), lambda n, score: ran.append(score))
    assert len(ran) == 1


def test_a_preset_that_fixes_an_option_is_not_tuned_on_it() -> None:
    assert "replay.eps" in tuning.list_open_options("f3crec")
    assert "replay.eps" not in tuning.list_open_options("kd")
    assert tuning.list_open_options("ft") == {}


# runs of one block (FedKDRec)


def once_table(**more: Any) -> experiment_spec.Experiment:
    message: dict[str, Any] = {
        "title": "Once",
        "kind": "once",
        "datasets": [ONE],
        "backbones": ["neuncf"],
        "seeds": 2,
        "metrics": ["ndcg@10", "hr@10", "full ndcg@10", "client ndcg@10", "samples down", "KB once"],
        "published_columns": ["test"],
        "baseline": "central",
        "compare": ["ours"],
        "quick": {"datasets": [ONE], "backbones": ["neuncf"], "seeds": 1},
        "train": {"rounds": 4, "participation": {"kind": "fraction", "rate": 0.5}},
        "split": {"kind": "leave-one-out"},
        "evaluate": {"k": [10], "metrics": ["ndcg", "hr"], "select_by": "ndcg@10", "sampled_negatives": 30, "every": 2},
        "variants": {
            "central": {"label": "centralised", "method": "fedavg", "kind": "central", "backbone": SMALL_TOWER},
            "ours": {"label": "FedKDRec", "method": "fedkdrec-paper", "backbone": SMALL_TOWER},
            "tally": {"label": "tally", "method": "fedavg", "backbone": {"name": "tally"}, "train": ALL},
        },
        "published": {ONE: {"neuncf": {"ndcg@10": {"ours": [0.4]}}}},
    }
    return experiment_spec.Experiment.model_validate(message | more)


ONE = "synthetic:users=60,items=80,per_user=12,groups=4"
ALL = {"participation": {"kind": "all"}}
SMALL_TOWER = {"dim": 4, "tower": [8], "lr": 0.01}


@pytest.fixture(scope="module")
def once_lines() -> tuple[
    experiment_spec.Experiment, list[experiment_cell.ExperimentCell], dict[str, single_block.Line]
]:
    experiment = once_table()
    result = experiment_spec.list_cells(experiment, experiment_spec.Settings(), [ONE], ["neuncf"], 2)
    lines = [line for cell in result for line in cells.run_job(cells.CellJob((cell,), None))]
    return experiment, result, {line["key"]: line for line in lines}


def test_a_method_brings_its_paper_along_and_the_table_has_the_last_word() -> None:
    ours = {
        c.variant: c.config
        for c in experiment_spec.list_cells(once_table(), experiment_spec.Settings(), [ONE], ["neuncf"], 1)
    }["ours"]
    assert (ours.train.optimiser, ours.train.local_epochs, ours.train.rounds) == ("lazy-adam", 2, 4)
    assert ours.train.participation.rate == 0.5
    assert ours.split.kind == "leave-one-out"
    assert ours.item_rows == "random"


def test_single_block_runs_report_quality_traffic_and_curve(
    once_lines: tuple[experiment_spec.Experiment, list[experiment_cell.ExperimentCell], dict[str, single_block.Line]],
) -> None:
    _, result, lines = once_lines
    by = {c.variant: lines[c.key] for c in result if c.seed == 1}
    ours = by["ours"]["values"]
    assert {"ndcg@10", "full hr@10", "client hr@10", "KB up", "down, paper's KB"} <= ours.keys()
    assert len(ours["picked"]) == len(ours["server_loss"]) == by["ours"]["rounds"] == 4
    assert ours["picked"][0] == 0.0
    assert np.mean(ours["picked"]) == pytest.approx(ours["samples down"][0], abs=1e-3)
    assert ours["KB down"][0] == pytest.approx(8 * ours["samples down"][0] / 1024, abs=1e-5)
    assert ours["full ndcg@10"] < ours["ndcg@10"]
    assert "client ndcg@10" not in by["central"]["values"]
    assert "KB up" not in by["central"]["values"]
    assert "client ndcg@10" not in by["tally"]["values"]


def test_a_run_in_a_table_has_the_numbers_of_a_run_by_itself(
    once_lines: tuple[experiment_spec.Experiment, list[experiment_cell.ExperimentCell], dict[str, single_block.Line]],
) -> None:
    _, result, lines = once_lines
    cell = next(c for c in result if c.variant == "ours")
    fed = assemble_federation(cell.config, Machine(threads=1))
    progress = make_initial_progress(fed)
    run_remaining_blocks(fed, progress, lambda report, now: None)
    assert lines[cell.key]["values"]["ndcg@10"] == [round(progress.results[0]["ndcg@10"], 6)]


def test_a_table_of_such_runs_compares_seeds_and_people(
    once_lines: tuple[experiment_spec.Experiment, list[experiment_cell.ExperimentCell], dict[str, single_block.Line]],
) -> None:
    experiment, result, lines = once_lines
    entries = tables.build_entries(experiment, result, lines)
    assert {(e.variant, e.column) for e in entries} == {("central", "test"), ("ours", "test"), ("tally", "test")}
    [ours] = [e for e in entries if e.variant == "ours" and e.metric == "ndcg@10"]
    assert (ours.seeds, ours.published) == (2, 0.4)
    tests = comparisons.compare_variants(experiment, result, lines)
    assert [(t.variant, t.pairs) for t in tests] == [("ours", 60)]
    apart = comparisons.compare_seeds(experiment, result, lines)
    assert [row[2] for row in apart] == ["FedKDRec", "tally"]
    page = table_markdown.to_markdown(
        experiment, entries, tests, [], comparisons.summarise_streams(experiment, result, lines), apart
    )
    assert "**Against centralised, seed by seed** (ndcg@10, 95 %" in page
    assert "(ndcg@10; pairs are users, averaged over seeds; two-sided t)" in page
    assert "LA" not in page
    assert "Once" in table_html.render_html(experiment, entries, tests)


def test_a_course_is_shown_at_the_rounds_that_are_asked_for(
    once_lines: tuple[experiment_spec.Experiment, list[experiment_cell.ExperimentCell], dict[str, single_block.Line]],
) -> None:
    _, result, lines = once_lines
    shown = once_table(metrics=["picked"], published_columns=["round 2", "round 4", "round 9"], published={})
    entries = tables.build_entries(shown, result, lines)
    assert [e.column for e in entries] == ["round 2", "round 4"]
    own = [lines[c.key]["values"]["picked"][3] for c in result if c.variant == "ours"]
    assert entries[1].mean == pytest.approx(np.mean(own))


def test_a_stream_of_blocks_is_no_run_of_one_block() -> None:
    cell = experiment_spec.list_cells(
        once_table(split={"kind": "blocks", "n_blocks": 2}), experiment_spec.Settings(), [ONE], ["neuncf"], 1
    )[0]
    [line] = cells.run_job(cells.CellJob((cell,), None))
    assert line["failed"].startswith("a table of kind 'once' wants one block")


def test_one_variant_can_run_alone_and_empty_selections_are_refused() -> None:
    wanted = reproduction.plan_table("fedkdrec/table1", ["ml-100k", "central"], 1, quick=False)
    assert {(c.variant, c.backbone) for c in wanted.cells} >= {("central", "neumf"), ("central", "lightgcn")}
    assert {c.variant for c in wanted.cells} == {"central"}
    assert wanted.stem == "table1-ml-100k-central"
    with pytest.raises(TacitaError, match="--only neumf --only fedncf leaves nothing of fedkdrec/table1 to run"):
        reproduction.plan_table("fedkdrec/table1", ["neumf", "fedncf"], 1, quick=False)


# rates


@pytest.fixture
def once_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> experiment_spec.Experiment:
    """A paper of single runs, of which one variant goes with the rates of another and one has none."""
    search = {"datasets": [ONE], "seed": 100, "rounds": 2, "lowest": 1e-3, "highest": 0.1}
    central, ours, tally = once_table().model_dump(exclude_none=True)["variants"].values()
    small = {"dim": 4, "tower": [8]}
    variants = {
        "central": {**central, "backbone": small},
        "ours": {**ours, "backbone": small},
        "less": {**ours, "backbone": small, "method": "fedkdrec-no-picks", "settings_of": "fedkdrec-paper"},
        "tally": tally,
    }
    result = once_table(tune=search, variants=variants, published={}, compare=[])
    monkeypatch.setattr(experiment_spec, "ROOT", tmp_path / "papers")
    (tmp_path / "papers" / "mine").mkdir(parents=True)
    text = tomli_w.dumps(result.model_dump(exclude_none=True, exclude_defaults=True))
    (tmp_path / "papers" / "mine" / "table1.toml").write_text(text)
    return experiment_spec.load_main_table("mine")


def test_rates_that_are_tried_fill_their_range_and_a_larger_budget_goes_on() -> None:
    for dimensions, farthest in ((1, 0.1), (2, 0.35)):
        few, many = low_discrepancy.spread_points(11, dimensions), low_discrepancy.spread_points(40, dimensions)
        assert many[:11] == few
        axes = np.meshgrid(*[np.linspace(0, 1, 41)] * dimensions)
        anywhere = np.stack([entry.ravel() for entry in axes], axis=1)
        apart = np.linalg.norm(anywhere[:, None] - np.array(few)[None], axis=2)
        assert apart.min(axis=1).max() < farthest


def test_every_method_has_the_same_budget_and_begins_at_its_default_rates(
    once_paper: experiment_spec.Experiment,
) -> None:
    entries = {entry.source: entry for entry in learning_rates.list_tuning_entries(once_paper, [], 5)}
    assert entries.keys() == {"central", "fedkdrec-paper"}
    assert {len(entry.cells) for entry in entries.values()} == {5}
    assert {c.config.train.rounds for entry in entries.values() for c in entry.cells} == {2}
    ours = entries["fedkdrec-paper"]
    assert (ours.trials[0].lr, ours.trials[0].server_lr) == (1e-3, 1e-3)
    for trial, cell in zip(ours.trials, ours.cells, strict=True):
        assert (cell.config.seed, cell.config.split.seed, cell.kind) == (100, 100, "once, tried")
        backbone, (part,), _ = build_components(cell.config)
        assert (backbone.config.lr, part.server_backbone.config.lr) == (trial.lr, trial.server_lr)
        assert part.server_backbone.config.tower == [8]  # all but its rate is the clients' own
    assert {entry.server_lr for entry in entries["central"].trials} == {None}
    with pytest.raises(TacitaError, match="--only less leaves no method with rates of its own"):
        learning_rates.list_tuning_entries(once_paper, ["less"], 5)


def test_no_seed_of_a_table_is_tuned_on() -> None:
    experiment = experiment_spec.load_main_table("fedkdrec")
    assert experiment.tune
    assert experiment.tune.seed not in range(experiment.seeds + 1)
    results = {(entry.backbone, entry.source) for entry in learning_rates.list_tuning_entries(experiment, [], 1)}
    assert {("neumf", "fedmf-kd"), ("neuncf", "ptf-fedrec"), ("lightgcn", "central")} <= results
    assert ("tally", "fedavg") not in results


def test_rates_are_tuned_once_and_taken_by_the_tables(
    once_paper: experiment_spec.Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def tune_them(*more: str) -> str:
        words = ["tune", "--paper", "mine", "--out", str(tmp_path), "--workers", "1", "--quiet", *more]
        with pytest.raises(SystemExit) as error:
            main(words)
        assert not error.value.code
        return capsys.readouterr().out

    def never(*_: object) -> None:
        pytest.fail("a trial looks at the test items")

    monkeypatch.setattr(single_block, "run_remaining_blocks", never)
    monkeypatch.setattr(single_block, "measure_trained_run", never)
    tune_them("--trials", "2", "--only", "ours")
    stored = experiment_spec.load_settings("mine", tmp_path)
    assert stored.chosen[ONE]["neuncf"].keys() == {"fedkdrec-paper"}
    report = tune_them("--trials", "3")
    lines = [json.loads(line) for line in (tmp_path / "trials" / f"mine-{ONE}-neuncf.jsonl").read_text().splitlines()]
    assert [line["variant"] for line in lines] == ["ours", "ours", "central", "central", "central", "ours"]
    assert all("values" not in line for line in lines)
    best = max((line for line in lines if line["variant"] == "ours"), key=lambda entry: entry["valid"])
    stored = experiment_spec.load_settings("mine", tmp_path)
    chosen = stored.find_choice("another dataset", "neuncf", "fedkdrec-paper")
    assert (chosen.lr, chosen.server_lr) == (best["lr"], best["parts"][0]["server"]["lr"])
    assert (chosen.valid, chosen.trials) == (best["valid"], 3)
    assert f"validation {best['valid']:.4f}, best of 3" in report
    by = {c.variant: c.config for c in experiment_spec.list_cells(once_paper, stored, [ONE], ["neuncf"], 1)}
    for name in ("ours", "less"):
        backbone, (part,), _ = build_components(by[name])
        assert (backbone.config.lr, part.server_backbone.config.lr) == (chosen.lr, chosen.server_lr)
    monkeypatch.setattr(cells, "run_job", lambda job: pytest.fail("the trials are finished"))
    assert tune_them("--trials", "3") == report


def test_failed_trial_is_reported_and_not_chosen(once_paper: experiment_spec.Experiment) -> None:
    [entry] = learning_rates.list_tuning_entries(once_paper, ["central"], 3)
    first, second, third = (cell.key for cell in entry.cells)
    lines = {first: {"failed": "diverged."}, second: {"valid": 0.2}, third: {"valid": 0.1}}
    assert learning_rates.choose_rates(entry, lines).lr == entry.trials[1].lr
    with pytest.raises(TacitaError, match=r"no trial has a score; the first one: diverged\."):
        learning_rates.choose_rates(entry, {key: {"failed": "diverged."} for key in lines})


def test_every_cell_of_the_tables_can_be_built() -> None:
    for name in ("table1", "table2", "table3", "table4", "selection", "questions", "ptf_options"):
        experiment, settings = experiment_spec.load_experiment(f"fedkdrec/{name}")
        for cell in experiment_spec.list_cells(experiment, settings, ["ml-100k"], experiment.backbones, 1):
            build_components(cell.config)


# schedules


def test_a_schedule_sends_as_much_as_the_agent_of_its_seed(
    once_paper: experiment_spec.Experiment, tmp_path: Path
) -> None:
    ours = once_paper.variants["ours"]
    options = {"prediction-transfer": {"select": "top"}}
    top = ours.model_copy(update={"sends_as": "ours", "options": options})
    table = once_paper.model_copy(update={"variants": {"top": top, "ours": ours}})
    result = experiment_spec.list_cells(table, experiment_spec.Settings(), [ONE], ["neuncf"], 2)
    alone = [entry for entry in result if entry.variant == "top"]
    wanted = reproduction.TablePlan(table, alone, "mine", "alone")
    with pytest.raises(TacitaError, match=r"as many items as 'ours', .*, seed 1 is not there; add --only ours"):
        reproduction.reproduce_table(wanted, tmp_path, workers=Workers(1))
    report: list[tuple[int, int]] = []
    reproduction.reproduce_table(
        replace(wanted, cells=result),
        tmp_path,
        workers=Workers(1),
        on_done=lambda done, total: report.append((done, total)),
    )
    assert report[-1] == (4, 4)
    entries = reproduction.reproduce_table(
        wanted, tmp_path, workers=Workers(1)
    ).entries  # the agent's cells are there now
    assert {entry.variant for entry in entries} == {"top"}
    lines = [json.loads(line) for line in (tmp_path / "cells" / f"mine-{ONE}-neuncf.jsonl").read_text().splitlines()]
    for seed in (1, 2):
        agent, control = (
            next(x for x in lines if (x["variant"], x["seed"]) == (name, seed)) for name in ("ours", "top")
        )
        scheduled = control["parts"][0]["scheduled"]
        assert scheduled == pytest.approx(np.mean(agent["values"]["picked"][1:]), abs=1e-3)
        assert control["values"]["samples down"][0] == pytest.approx(agent["values"]["samples down"][0], rel=0.1)
    assert len(lines) == 4


def test_schedule_of_a_failed_agent_names_the_reason(once_paper: experiment_spec.Experiment) -> None:
    ours = once_paper.variants["ours"]
    table = once_paper.model_copy(
        update={"variants": {"ours": ours, "top": ours.model_copy(update={"sends_as": "ours"})}}
    )
    agent, top = experiment_spec.list_cells(table, experiment_spec.Settings(), [ONE], ["neuncf"], 1)
    with pytest.raises(TacitaError, match=r"seed 1 failed: diverged\."):
        schedules.with_upload_sizes([top], {agent.key: {"variant": "ours", "failed": "diverged."}})


def test_tables_of_fedkdrec_share_their_cells() -> None:
    keys = {}
    for name in ("table1", "table2", "table3", "table4", "figure2", "selection"):
        wanted = reproduction.plan_table(f"fedkdrec/{name}", ["ml-100k", "neuncf"], 1, quick=False)
        keys[name] = {c.variant: c.key for c in wanted.cells if c.variant == "fedkdrec"}["fedkdrec"]
    assert len(set(keys.values())) == 1
    figure = reproduction.plan_table("fedkdrec/figure3", ["ml-100k", "neuncf"], 1, quick=False)
    assert keys["table1"] in {c.key for c in figure.cells}  # alpha 0.5, however it is said
