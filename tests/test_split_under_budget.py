"""Under a budget a person's rows are filtered, cut and split by that person alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tacita.core.config import RunConfig, SplitConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream
from tacita.data.interaction_table import Interactions
from tacita.data.splits import split
from tacita.federation.rounds import make_initial_progress, run_remaining_blocks
from tacita.runs import default_model
from tacita.runs.assembly import Machine, RunTable, assemble_federation
from tacita.runs.default_model import measure_data

Row = tuple[int, int, int]  # user, item, time
SMALL = "synthetic:users=60,items=40,per_user=12,groups=4"
PRIVATE: dict[str, dict[str, Any]] = {
    "tally": {"backbone": {"name": "tally"}, "privacy": {"epsilon": 8.0}},
    "dpps": {"method": "dpps"},
    "dp-fedavg": {"method": "dp-fedavg"},
    "laplace-noise": {"parts": [{"name": "laplace-noise", "mode": "ldp"}]},
}


def table(rows: list[Row]) -> Interactions:
    """Rows as a source would hand them over: codes by first appearance, raw ids u7 and i3."""
    users = tuple(dict.fromkeys(f"u{user}" for user, _, _ in rows))
    items = tuple(dict.fromkeys(f"i{item}" for _, item, _ in rows))
    return Interactions(
        name="toy",
        user=np.array([users.index(f"u{user}") for user, _, _ in rows], np.int32),
        item=np.array([items.index(f"i{item}") for _, item, _ in rows], np.int32),
        rating=None,
        timestamp=np.array([time for _, _, time in rows], np.int64),
        split=None,
        user_ids=users,
        item_ids=items,
        titles={},
        fingerprint="toy",
        format_note="",
    )


def config_of(data: str = SMALL, **settings: Any) -> RunConfig:
    evaluate = {"k": [5], "select_by": "ndcg@5", "controls": False}
    train = {"rounds": 2}
    if settings.get("method") == "dp-fedavg":
        train |= {"aggregation": "fixed", "participation": {"kind": "poisson", "rate": 0.5}}  # type: ignore[dict-item]
    return validate_model(RunConfig, {"data": data, "evaluate": evaluate, "train": train, **settings}, "a test")


def rows_by_user(stream: BlockStream) -> dict[str, list[tuple[int, str, str]]]:
    """Of every user the block, role and item of each entry."""
    result: dict[str, list[tuple[int, str, str]]] = {}
    for block in stream.blocks:
        for role in ("train", "valid", "test"):
            lists = getattr(block, role)
            for row, item in zip(lists.rows(), lists.ids):
                entry = (block.index, role, stream.item_ids[item])
                result.setdefault(stream.user_ids[row], []).append(entry)
    return {user: sorted(entries) for user, entries in result.items()}


def draw_rows(n_users: int, per_user: int) -> list[Row]:
    rng = np.random.default_rng(7)
    rows = []
    for user in range(n_users):
        items = rng.permutation(30)[:per_user]
        times = rng.integers(0, 10_000, per_user)
        rows += [(user, int(item), int(time)) for item, time in zip(items, times)]
    return rows


MOVER = [(99, item, 9_999) for item in range(30)]  # somebody with many late rows


@pytest.mark.parametrize("borders", ["person", [4_000.0, 6_000.0, 8_000.0]])
def test_one_person_moves_nobody_elses_rows(borders: Any) -> None:
    config = SplitConfig(kind="blocks", n_blocks=4, borders=borders)
    rows = draw_rows(20, 12)
    without = rows_by_user(split(table(rows), config))
    side_output = rows_by_user(split(table([*rows, *MOVER]), config))
    assert side_output.pop("u99")
    assert side_output == without


def test_quantiles_of_all_rows_move_others() -> None:
    """The control: this is what a budget has to refuse."""
    config = SplitConfig(kind="blocks", n_blocks=4, borders="quantile")
    rows = draw_rows(20, 12)
    without = rows_by_user(split(table(rows), config))
    side_output = rows_by_user(split(table([*rows, *MOVER]), config))
    side_output.pop("u99")
    assert side_output != without


def test_everybodys_own_rows_are_cut_in_the_shares_of_the_split() -> None:
    stream = split(table(draw_rows(20, 20)), SplitConfig(kind="blocks", n_blocks=4, borders="person"))
    sizes = [[len([e for e in entries if e[0] == b]) for b in range(4)] for entries in rows_by_user(stream).values()]
    assert all(first == 12 and min(later) >= 2 and max(later) <= 3 for first, *later in sizes)
    assert all(sum(size) == 20 for size in sizes)


def test_who_has_one_row_is_in_the_first_block() -> None:
    stream = split(table([*draw_rows(9, 12), (50, 3, 5)]), SplitConfig(kind="blocks", n_blocks=3, borders="person"))
    assert [block for block, _, _ in rows_by_user(stream)["u50"]] == [0]


def test_dates_cut_and_number_the_blocks() -> None:
    day = 86_400
    rows = [(user, item, 1_600_000_000 + item * day) for user in range(4) for item in range(10)]
    stream = split(table(rows), SplitConfig(kind="blocks", borders=["2020-09-16", "2020-09-20T00:00:00+00:00"]))
    assert [block.n_rows for block in stream.blocks] == [12, 16, 12]


@pytest.mark.parametrize(
    ("borders", "words"),
    [
        (["soon"], "no date"),
        ([5.0, 4.0], "ascend"),
        ([20_000.0], "no row falls into block 1"),
        (["2020-01-01"], "numbers in their own unit"),
    ],
)
def test_bad_borders_are_refused_in_words(borders: Any, words: str) -> None:
    with pytest.raises(TacitaError, match=words):
        split(table(draw_rows(5, 12)), SplitConfig(kind="blocks", borders=borders))


@pytest.mark.parametrize("name", PRIVATE)
def test_a_budget_cuts_everybodys_own_rows_and_says_so(name: str) -> None:
    federation = assemble_federation(config_of(**PRIVATE[name]), Machine(threads=1))
    assert federation.config.split.borders == "person"
    assert federation.config.split.k_core == 0
    assert any("every person's own rows" in note for note in federation.stream.notes)


def test_without_a_budget_borders_stay_as_they_were() -> None:
    federation = assemble_federation(config_of(), Machine(threads=1))
    assert federation.config.split.borders == "auto"
    assert not any("own rows" in note for note in federation.stream.notes)


@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"borders": "quantile"}, "split.borders"),
        ({"k_core": 5}, "split.min_user"),
        ({"kind": "global-random"}, "use 'random'"),
    ],
)
def test_a_budget_refuses_what_couples_people(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(TacitaError, match=words):
        assemble_federation(config_of(**PRIVATE[name], split=settings), Machine(threads=1))


def test_a_split_without_time_blocks_keeps_its_borders_setting() -> None:
    federation = assemble_federation(config_of(**PRIVATE["tally"], split={"kind": "random"}), Machine(threads=1))
    assert federation.config.split.borders == "auto"


# Roles and blocks of the source


def given_table(roles: dict[str, int], blocks: dict[str, int] | None = None) -> Interactions:
    """Six rows a user; the roles and blocks of single users' last rows differ from the others'."""
    rows = [(user, 5 * user % 7 + item, item) for user in range(20) for item in range(6)]
    source = table(rows)
    split_roles = np.zeros(len(rows), np.int8)
    numbers = np.zeros(len(rows), np.int32)
    for user, role in roles.items():
        last = 6 * source.user_ids.index(user) + 5
        split_roles[last] = role
    for user, block in (blocks or {}).items():
        last = 6 * source.user_ids.index(user) + 5
        numbers[last] = block
    order = np.argsort(numbers, kind="stable")
    columns = {"user": source.user[order], "item": source.item[order], "timestamp": source.timestamp[order]}
    has_blocks = blocks is not None
    return replace(source, **columns, split=split_roles[order], block=numbers[order] if has_blocks else None)


def assemble_given(source: Interactions, **privacy: Any) -> Any:
    settings: dict[str, Any] = {"split": {"kind": "given"}, "catalogue": "from-data"}
    config = config_of(backbone={"name": "tally"}, privacy={"epsilon": 8.0, **privacy}, **settings)
    return assemble_federation(config, Machine(1), data=RunTable(source))


@pytest.mark.parametrize("role", [1, 2])
def test_one_persons_roles_change_nobody_elses(role: int) -> None:
    """With a validation row of one person all others still lend some of theirs."""
    plain = rows_by_user(assemble_given(given_table({})).stream)
    changed = rows_by_user(assemble_given(given_table({"u3": role})).stream)
    assert plain.pop("u3") != changed.pop("u3")
    assert plain == changed


def test_without_a_budget_one_validation_row_still_ends_lending() -> None:
    config = SplitConfig(kind="given")
    lent = rows_by_user(split(given_table({}), config))
    kept = rows_by_user(split(given_table({"u3": 1}), config))
    assert lent["u4"] != kept["u4"]


def test_blocks_of_the_source_do_not_plan_a_budget() -> None:
    with pytest.raises(TacitaError, match=r"privacy\.blocks"):
        assemble_given(given_table({}, {"u3": 1}))
    assert assemble_given(given_table({}, {"u3": 1}), blocks=2).config.privacy.blocks == 2


@pytest.mark.parametrize("role", [0, 2])
def test_a_block_that_nobody_trains_on_is_released_all_the_same(role: int) -> None:
    """Whether block 1 has a training row must not show in what is released."""
    federation = assemble_given(given_table({"u3": role}, {"u3": 1}), blocks=2)
    progress = make_initial_progress(federation)
    run_remaining_blocks(federation, progress, lambda report, progress: None)
    assert progress.server.heads["released"].tolist() == [1, 2]
    assert [result["rounds"] for result in progress.results] == [1, 1]


def test_the_default_model_reads_no_times_of_single_people_under_a_budget() -> None:
    same_times = table([(user, item, 5) for user in range(9) for item in range(4)])
    one_later = replace(same_times, timestamp=same_times.timestamp + (np.arange(36) == 7))
    facts = [measure_data(RunTable(source), is_private=True) for source in (same_times, one_later)]
    assert facts[0].has_times == facts[1].has_times
    assert not measure_data(RunTable(same_times)).has_times


def test_the_default_model_counts_the_items_of_the_catalogue(tmp_path: Path) -> None:
    """An item outside of the public list must not decide what is trained."""
    path = tmp_path / "items.csv"
    path.write_text("item\n" + "".join(f"i{item}\n" for item in range(30)))
    settings = {"data": SMALL, "catalogue": str(path), "privacy": {"epsilon": 8.0}}
    frame = pl.DataFrame({"user": ["a", "a", "b"], "item": ["i1", "odd", "i2"]})
    model = default_model.choose_model(settings, "a test", Machine(1), frame, lambda note: None)
    assert "30 items" in model.reason
