"""Under a budget a person's rows are filtered, cut and split by that person alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tacita.core.config import RunConfig, SplitConfig, validate_model
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream
from tacita.data.interaction_table import Interactions
from tacita.data.splits import split
from tacita.runs.assembly import Machine, assemble

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
    federation = assemble(config_of(**PRIVATE[name]), Machine(threads=1))
    assert federation.config.split.borders == "person"
    assert federation.config.split.k_core == 0
    assert any("every person's own rows" in note for note in federation.stream.notes)


def test_without_a_budget_borders_stay_as_they_were() -> None:
    federation = assemble(config_of(), Machine(threads=1))
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
        assemble(config_of(**PRIVATE[name], split=settings), Machine(threads=1))


def test_a_split_without_time_blocks_keeps_its_borders_setting() -> None:
    federation = assemble(config_of(**PRIVATE["tally"], split={"kind": "random"}), Machine(threads=1))
    assert federation.config.split.borders == "auto"
