"""Shards on disk: the same lists as in memory, the same bits on any number of ranks, and damage that is refused."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from helpers.command_line import call
from tacita.core import ragged
from tacita.core.config import RunConfig, SplitConfig
from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import BlockStream, Keys, Ragged
from tacita.data.shards import row_batches, shard_import
from tacita.data.shards.folder import is_shard_folder, open_shards
from tacita.data.shards.placement import assign_places, order_shards
from tacita.data.shards.shard_import import import_shards
from tacita.data.sources import load_interactions
from tacita.data.splits import split
from tacita.data.values import FileHints
from tacita.federation.evaluation import TrainedState, plan_test, run_evaluation
from tacita.federation.ranks.shards import take_shard
from tacita.federation.rounds import begin_block, make_initial_progress
from tacita.runs import assembly
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.training import train

N_USERS = 60


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of many people in no order, with times and ratings."""
    rng = np.random.default_rng(4)
    rows = ["user,item,rating,timestamp"]
    for number in range(N_USERS * 12):
        user = f"p{rng.integers(N_USERS)}"
        rows.append(f'{user},"i{int(40 * rng.random() ** 2)}",{rng.integers(1, 6)},{1_600_000_000 + 37 * number}')
    path = tmp_path_factory.mktemp("clicks") / "clicks.csv"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def collect_lists(stream: BlockStream) -> dict[tuple[object, ...], list[tuple[object, ...]]]:
    """Every list by block, role and raw id: its raw items, with their columns."""
    lists = {}
    for block in stream.blocks:
        for role in ("train", "valid", "test"):
            ragged = getattr(block, role)
            for user in range(block.n_users):
                entries = slice(ragged.ptr[user], ragged.ptr[user + 1])
                items = [stream.item_ids[item] for item in ragged.ids[entries]]
                columns = [ragged.values[name][entries].tolist() for name in sorted(ragged.values)]
                if items:
                    lists[block.index, role, stream.user_ids[user]] = list(zip(items, *columns))
    return lists


SPLITS = (
    SplitConfig(kind="leave-one-out"),
    SplitConfig(kind="random", min_user=5),
    SplitConfig(kind="blocks"),
    SplitConfig(kind="blocks", borders=[1_600_010_000, 1_600_020_000]),
    SplitConfig(min_rating=3.0, repeats="keep"),
)


@pytest.mark.parametrize("settings", SPLITS, ids=str)
@pytest.mark.parametrize("n_shards", [1, 3, 4])
def test_shards_hold_the_lists_of_the_table(
    clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: SplitConfig, n_shards: int
) -> None:
    monkeypatch.setattr(row_batches, "BATCH_BYTES", 1000)  # many pieces, cut inside of rows
    out = tmp_path / "shards"
    listing = import_shards(clicks, out, n_shards, settings, FileHints())
    stream = open_shards(out)
    whole = split(load_interactions(str(clicks)), listing.split)
    assert collect_lists(stream) == collect_lists(whole)
    assert sorted(stream.user_ids) == sorted(whole.user_ids)
    for block, expected in zip(stream.blocks, whole.blocks, strict=True):
        assert (block.n_users, block.n_rows) == (expected.n_users, expected.n_rows)
    if whole.low_rated is not None:
        assert stream.low_rated is not None
        kept = set(whole.item_ids)
        for user, raw_id in enumerate(stream.user_ids):
            own = {stream.item_ids[item] for item in stream.low_rated.row(user)}
            other = {whole.item_ids[item] for item in whole.low_rated.row(whole.user_ids.index(raw_id))}
            assert own & kept == other


@pytest.mark.parametrize("kind", ["parquet", "gzip"])
def test_files_of_every_kind_have_the_same_shards(clicks: Path, tmp_path: Path, kind: str) -> None:
    settings = SplitConfig(kind="random")
    import_shards(clicks, tmp_path / "text", 2, settings, FileHints())
    if kind == "parquet":
        other = tmp_path / "clicks.parquet"
        pl.read_csv(clicks).write_parquet(other, row_group_size=50)
    else:
        other = tmp_path / "clicks.csv.gz"
        other.write_bytes(gzip.compress(clicks.read_bytes()))
    import_shards(other, tmp_path / "other", 2, settings, FileHints())
    assert collect_lists(open_shards(tmp_path / "other")) == collect_lists(open_shards(tmp_path / "text"))


def test_each_person_is_hashed_once_and_not_in_every_batch(
    clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key takes microseconds, and there may be ten million people in a hundred batches."""
    n_hashed = 0

    def count_hashed(owners: Sequence[str]) -> Keys:
        nonlocal n_hashed
        n_hashed += len(owners)
        return derive_keys(owners)

    monkeypatch.setattr(row_batches, "BATCH_BYTES", 1000)
    monkeypatch.setattr(shard_import, "derive_keys", count_hashed)
    import_shards(clicks, tmp_path / "shards", 4, SplitConfig(kind="random"), FileHints())
    assert n_hashed == N_USERS


def test_people_of_a_rank_stand_side_by_side(clicks: Path, tmp_path: Path) -> None:
    """So that a rank maps its own rows and copies none."""
    import_shards(clicks, tmp_path / "shards", 8, SplitConfig(kind="random"), FileHints())
    config = RunConfig(data=str(tmp_path / "shards"))
    federation = assemble_federation(config, Machine(1))
    for n_ranks in (1, 2, 4, 8):
        for rank in range(n_ranks):
            shard = take_shard(federation, rank, n_ranks)
            assert np.array_equal(shard.users, np.arange(shard.users[0], shard.users[-1] + 1))
            lists = shard.federation.stream.blocks[0].train
            assert np.shares_memory(lists.ids, federation.stream.blocks[0].train.ids)
            assert np.shares_memory(shard.federation.stream.user_keys, federation.stream.user_keys)
            expected = federation.stream.blocks[0].train.take(shard.users)
            assert np.array_equal(lists.ptr, expected.ptr)
            assert np.array_equal(lists.ids, expected.ids)
            assert shard.federation.stream.user_ids[0] == federation.stream.user_ids[int(shard.users[0])]


def test_shards_of_one_remainder_follow_each_other() -> None:
    for n_shards in (1, 2, 4, 8, 16):
        order = order_shards(n_shards)
        assert sorted(order) == list(range(n_shards))
        for n_ranks in (1, 2, 4):
            if n_ranks <= n_shards:
                ranks = [shard % n_ranks for shard in order]
                changes = sum(before != after for before, after in itertools.pairwise(ranks))
                assert changes == n_ranks - 1
    assert order_shards(3) == [0, 1, 2]
    keys = np.arange(1000, dtype=np.uint64)
    assert np.array_equal(assign_places(keys, 8) % 4, assign_places(keys, 4))


@pytest.mark.parametrize("method", ["fedavg", "f3crec"])
def test_a_run_on_shards_has_the_same_bits_on_ranks(clicks: Path, tmp_path: Path, method: str) -> None:
    shards = tmp_path / "shards"
    import_shards(clicks, shards, 4, SplitConfig(), FileHints())
    arguments = ["train", "--data", shards, "--backbone", "mf", "--method", method, "--rounds", 2]
    arguments += ["--set", "train.aggregator=ideal", "--no-controls", "--quiet"]
    arguments += ["--set", "evaluate.valid_users=10", "--set", "evaluate.test_users=15"]
    if method == "f3crec":
        arguments += ["--set", "replay.top_n=10"]
    for n_ranks in (1, 2):
        words = [*arguments, "--ranks", n_ranks, "--out", tmp_path / f"run-{n_ranks}"]
        result = call(*map(str, words))
        assert result.code == 0, result.err
    for name in ("server.safetensors", "clients.safetensors"):
        assert (tmp_path / "run-1" / name).read_bytes() == (tmp_path / "run-2" / name).read_bytes()
    blocks, blocks_of_ranks = (read_blocks(tmp_path / f"run-{n_ranks}") for n_ranks in (1, 2))
    assert blocks == blocks_of_ranks
    assert blocks[0]["users"] == 15


def read_blocks(run: Path) -> list[dict[str, object]]:
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    blocks: list[dict[str, object]] = result["blocks"]
    return blocks


def test_of_some_users_each_has_the_score_they_have_among_all(clicks: Path) -> None:
    """A test of a sample joins, masks and draws from the lists of the sample alone."""
    evaluate = {"sampled_negatives": 10, "read": "known"}
    config = RunConfig.model_validate({"data": str(clicks), "evaluate": evaluate})
    federation = assemble_federation(config, Machine(1))
    some = config.evaluate.model_copy(update={"test_users": 9})
    sampled = replace(federation, config=config.model_copy(update={"evaluate": some}))
    progress = make_initial_progress(federation)
    for block in federation.stream.blocks:
        begin_block(federation, progress, block.index)
        trained = TrainedState(progress.server, progress.clients)
        whole = run_evaluation(federation, trained, plan_test(federation, block, "history"))
        part = run_evaluation(sampled, trained, plan_test(sampled, block, "history"))
        assert 5 < len(part.users) <= 9  # the mask hides all that a few want
        for name, values in part.values.items():
            assert np.array_equal(values, whole.values[name][np.isin(whole.users, part.users)])


@pytest.mark.parametrize("kind", ["times", "mixed", "empty"])
def test_joined_lists_are_those_of_pairs_joined_in_turn(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(ragged, "_ROWS_AT_ONCE", 3)
    rng = np.random.default_rng(5)
    lists = []
    for number, n_rows in enumerate((4, 7, 7)):
        counts = rng.integers(0, 4, n_rows) * (kind != "empty")
        n = int(counts.sum())
        columns = {"time": rng.integers(0, 99, n), "rating": rng.random(n, np.float32)}
        if kind == "mixed" and number == 1:
            del columns["rating"]
        ptr = np.concatenate([[0], np.cumsum(counts)])
        lists.append(Ragged(ptr, rng.integers(0, 9, n).astype(np.int32), columns))
    expected = Ragged.empty(0)
    for added in lists:
        expected = expected.join_rows(added)
    joined = ragged.join_lists(lists)
    assert np.array_equal(joined.ptr, expected.ptr)
    assert np.array_equal(joined.ids, expected.ids)
    assert joined.values.keys() == expected.values.keys()
    for name, column in expected.values.items():
        assert joined.values[name].dtype == column.dtype
        assert np.array_equal(joined.values[name], column)
    assert ragged.join_lists(lists, with_columns=False).values == {}


def test_of_many_people_samples_are_measured(clicks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(write_shards(clicks, tmp_path / "shards"))
    monkeypatch.setattr(assembly, "MANY_USERS", N_USERS)
    sampled = assemble_federation(RunConfig(data=folder), Machine(1))
    assert sampled.config.evaluate.test_users == assembly.SAMPLED["test_users"]
    assert not sampled.config.evaluate.controls
    assert "evaluate.test_users" in sampled.stream.notes[-1]
    whole = {"valid_users": 0, "test_users": 0, "controls": True}
    requested = assemble_federation(RunConfig.model_validate({"data": folder, "evaluate": whole}), Machine(1))
    assert requested.config.evaluate.test_users == 0
    assert requested.config.evaluate.controls
    monkeypatch.setattr(assembly, "MANY_USERS", N_USERS + 1)
    assert assemble_federation(RunConfig(data=folder), Machine(1)).config.evaluate.test_users == 0


def test_a_run_on_shards_recommends_and_forgets(clicks: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    import_shards(clicks, shards, 2, SplitConfig(kind="leave-one-out"), FileHints())
    config = RunConfig(data=str(shards), backbone={"name": "tally"})
    run = train(config, tmp_path / "run", Machine(1))
    assert len(run.recommend("p3", k=4)) == 4
    certificate = run.forget("p3")
    assert certificate is not None
    assert len(run.recommend("p5", k=4)) == 4


# What is refused


def write_shards(clicks: Path, out: Path) -> Path:
    import_shards(clicks, out, 2, SplitConfig(kind="random"), FileHints())
    return out


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (SplitConfig(k_core=5), "k_core"),
        (SplitConfig(kind="global-random"), "global-random"),
        (SplitConfig(kind="blocks", borders="quantile"), "quantile"),
    ],
)
def test_a_split_of_all_rows_together_is_refused(
    clicks: Path, tmp_path: Path, settings: SplitConfig, word: str
) -> None:
    with pytest.raises(TacitaError, match=word):
        import_shards(clicks, tmp_path / "shards", 2, settings, FileHints())
    assert list(tmp_path.iterdir()) == []


def test_a_refused_file_leaves_nothing(tmp_path: Path) -> None:
    for name, text, word in (
        ("empty.csv", "user,item\n", "no rows"),
        ("missing.csv", "user,item\na,x\nb,\nc,y\n" * 5, "no item id"),
        ("few.csv", "user,item\na,x\nb,y\n", "people|user"),
        ("blocks.csv", "user,item,split,block\na,x,train,0\n", "block"),
    ):
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        with pytest.raises(TacitaError, match=word):
            import_shards(file, tmp_path / "shards", 2, SplitConfig(), FileHints())
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".csv"] * 4


def test_rows_without_a_value_are_dropped_and_counted(clicks: Path, tmp_path: Path) -> None:
    holes = tmp_path / "holes.csv"
    holes.write_text(clicks.read_text(encoding="utf-8") + "p1,,3,1600000000\n,i2,3,1600000000\n", encoding="utf-8")
    listing = import_shards(holes, tmp_path / "shards", 2, SplitConfig(), FileHints(drop_missing=True))
    assert any(note.startswith("2 rows that lack a value") for note in listing.notes)


def test_settings_that_come_too_late_are_refused(clicks: Path, tmp_path: Path) -> None:
    folder = str(write_shards(clicks, tmp_path / "shards"))
    for settings, word in (
        ({"split": {"kind": "leave-one-out"}}, "split.kind"),
        ({"columns": {"user": "user"}}, "columns"),
        ({"catalogue": "from-data"}, "catalogue"),
        ({"backbone": {"name": "tally"}, "privacy": {"epsilon": 4.0}}, "epsilon"),
    ):
        with pytest.raises(TacitaError, match=word):
            assemble_federation(RunConfig.model_validate({"data": folder, **settings}), Machine(1))


def test_verbs_that_need_rows_name_the_remedy(clicks: Path, tmp_path: Path) -> None:
    folder = write_shards(clicks, tmp_path / "shards")
    assert is_shard_folder(str(folder))
    commands: Sequence[tuple[object, ...]] = (
        ("data", "describe", folder),
        ("train", "--data", folder, "--out", tmp_path / "run"),
    )
    for command in commands:
        result = call(*map(str, command))
        assert result.code == 2
        assert "--backbone tally" in " ".join(result.err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["short", "item", "order", "listing", "version", "ids"])
def test_damage_is_refused_in_a_sentence(clicks: Path, tmp_path: Path, damage: str) -> None:
    folder = write_shards(clicks, tmp_path / "shards")
    ids = folder / "block-0-train-ids.bin"
    ptr = folder / "block-0-train-ptr.bin"
    listing = folder / "shards.json"
    if damage == "short":
        ids.write_bytes(ids.read_bytes()[:-4])
    elif damage == "item":
        numbers = np.fromfile(ids, "<i4")
        numbers[3] = 10_000
        numbers.tofile(ids)
    elif damage == "order":
        pointers = np.fromfile(ptr, "<i8")
        pointers[2] = pointers[-1] + 5
        pointers.tofile(ptr)
    elif damage == "listing":
        listing.write_text("{", encoding="utf-8")
    elif damage == "version":
        listing.write_text(json.dumps({"format": "tacita-shards/9"}), encoding="utf-8")
    else:
        (folder / "users.parquet").write_bytes(b"PAR1")
    with pytest.raises(TacitaError):
        open_shards(folder)


def change_listing(folder: Path, **values: object) -> None:
    listing = folder / "shards.json"
    listing.write_text(json.dumps(json.loads(listing.read_text()) | values), encoding="utf-8")


def change_table(path: Path, column: pl.Expr | None, drop: str = "") -> None:
    frame = pl.read_parquet(path)
    changed = frame.drop(drop) if column is None else frame.with_columns(column)
    changed.write_parquet(path)


def plant_pipe(folder: Path) -> None:
    (folder / "users.parquet").unlink()
    os.mkfifo(folder / "users.parquet")


def plant_overflow(folder: Path) -> None:
    """Pointers whose differences run over 64 bits: read as lists, they lie outside of every array."""
    ptr = folder / "block-0-train-ptr.bin"
    pointers = np.fromfile(ptr, "<i8")
    pointers[1:3] = (2**62, -(2**62) - 1)
    pointers.tofile(ptr)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "pointers that run over": plant_overflow,
    "a pipe": plant_pipe,
    "half a character in a name": lambda folder: change_listing(folder, name="\ud800"),
    "half a character in a note": lambda folder: change_listing(folder, notes=["\ud800"]),
    "no titles": lambda folder: change_table(folder / "items.parquet", None, "title"),
    "titles of bytes": lambda folder: change_table(folder / "items.parquet", pl.lit(b"\xff").alias("title")),
    "titles of lists": lambda folder: change_table(folder / "items.parquet", pl.lit([["x"]]).alias("title")),
    "an item twice": lambda folder: change_table(folder / "items.parquet", pl.lit("i1").alias("item")),
    "a person twice": lambda folder: change_table(folder / "users.parquet", pl.lit("p1").alias("user")),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("kind", HOSTILE)
def test_folders_made_to_do_harm_are_refused_in_a_sentence(clicks: Path, tmp_path: Path, kind: str) -> None:
    """One ended the process by reading outside of an array, one waited forever, the others ended in a traceback."""
    folder = write_shards(clicks, tmp_path / "shards")
    HOSTILE[kind](folder)
    with pytest.raises(TacitaError, match="import the data again"):
        open_shards(folder)


def test_an_id_is_the_same_in_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pandas stores whole numbers as floats where one is missing; such a batch must not rename people."""
    pairs = [(float(user), float(item)) for item in range(8) for user in range(12)]
    pairs[50] = (float("nan"), 1.0)
    source = tmp_path / "clicks.parquet"
    pl.DataFrame(pairs, schema=["user", "item"], orient="row").write_parquet(source)
    monkeypatch.setattr(row_batches, "BATCH_ROWS", 24)
    hints = FileHints({}, None, None, True)
    listing = import_shards(source, tmp_path / "shards", 2, SplitConfig(), hints)
    stream = open_shards(tmp_path / "shards")
    assert listing.users == 12
    assert set(stream.user_ids) == {str(user) for user in range(12)}
    assert set(stream.item_ids) == {str(item) for item in range(8)}
