"""One run on 1, 2 and 4 ranks: the same bits with whole numbers, the same numbers up to rounding with floats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from frozen import ADAM, DATA, INTEREST, LIPM, MATCHED, MF
from helpers import rank_runs
from tacita.core.codec import unpack_array_file
from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import RoundReplay
from tacita.federation.ranks.broadcast_codec import decode_question, decode_specs, encode_question, encode_specs
from tacita.federation.ranks.client_fields import join_client_fields
from tacita.federation.ranks.rank_messages import RankReply
from tacita.federation.ranks.rank_place import RankPlace, read_launcher_place
from tacita.federation.ranks.sharded_devices import check_rank_settings
from tacita.federation.ranks.shards import assign_ranks, take_shard
from tacita.messages import DenseArrays, SparseRows, Spec
from tacita.round.question import Question
from tacita.runs.assembly import assemble_federation
from tacita.runs.ranks import check_ranks, is_service_rank

FILES = ("result.json", "server.safetensors", "clients.safetensors")
RANDOM = {"kind": "random"}
FRACTION = {"kind": "fraction", "rate": 0.4}
FORGET = {"kind": "forget", "users": [3, 8, 20, 41], "items": 2}
LEAVE = {"kind": "leave", "users": [5, 30], "items": 0}
UNSHARE = {"kind": "unshare", "users": [0], "every": 3, "items": 1}


def make_run(ideal: bool = True, requests: tuple[dict[str, Any], ...] = (), **values: Any) -> rank_runs.Run:
    train = {**values.pop("train", {}), "rounds": 3}
    if ideal:
        train["aggregator"] = "ideal"
    evaluate = {"controls": False, **values.pop("evaluate", {})}
    base = {"data": DATA, "backbone": MF, "seed": 3, "privacy": {"reproducible_noise": True}}
    config = base | values | {"train": train, "evaluate": evaluate}
    return {"config": config, "requests": list(requests)}


EXACT: dict[str, rank_runs.Run] = {
    "fedavg": make_run(method="fedavg"),
    "fraction": make_run(train={"participation": FRACTION}, method="rlp2", evaluate={"valid_users": 20}),
    "poisson": make_run(
        method="f3crec", train={"aggregation": "fixed", "participation": {"kind": "poisson", "rate": 0.4}}
    ),
    "f3crec": make_run(method="f3crec"),
    "fedshare": make_run(method="fedshare", requests=(UNSHARE,)),
    "fedshare that trains again": make_run(method="fedshare", parts=[{"name": "retrain"}], requests=(UNSHARE,)),
    "pdc-frs": make_run(method="pdc-frs", requests=(UNSHARE, LEAVE)),
    "fedkdrec": make_run(False, method="fedkdrec", **ADAM),
    "fedpergnn": make_run(method="fedpergnn", **MATCHED),
    "lipm": make_run(method="lipm", backbone=INTEREST, train=LIPM["train"]),
    "lipm-dpps": make_run(method="lipm-dpps", parts=[{"name": "dpps", "clip": 0.01}]),
    "dp-fedavg": make_run(
        method="dp-fedavg",
        parts=[{"name": "dp-fedavg", "noise": 1.0, "clip": 0.5}],
        train={"aggregation": "fixed", "participation": {"kind": "poisson", "rate": 0.4}},
    ),
    "silos": make_run(method="f3crec", train={"silos": 7}),
    "personal table": make_run(backbone={"name": "pfedrec"}, evaluate={"item_table": "personal"}),
    "candidates": make_run(split={"kind": "leave-one-out"}, evaluate={"sampled_negatives": 20}),
    "unmasked": make_run(split=RANDOM, evaluate={"mask": "history", "unmasked": True}),
    "tally": make_run(backbone={"name": "tally"}, requests=(FORGET, LEAVE)),
    "tally filter": make_run(backbone={"name": "tally", "solve": "filter", "axes": 16}, requests=(FORGET,)),
    "tally-order": make_run(backbone={"name": "tally-order", "order_window": 6}),
    "tally under a budget": make_run(backbone={"name": "tally"}, privacy={"epsilon": 20.0, "reproducible_noise": True}),
}
ROUNDED = {
    "plain fedavg": make_run(False, method="fedavg"),
    "plain f3crec": make_run(False, method="f3crec"),
    "plain tally": make_run(False, backbone={"name": "tally"}),
}
RANKS = (1, 2, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs on every number of ranks; processes start once for all runs."""
    place = tmp_path_factory.mktemp("ranks")
    for n_ranks in RANKS:
        processes = rank_runs.start_ranks(place, n_ranks, EXACT | ROUNDED)
        codes = [process.wait(300) for process in processes]
        assert codes == [0] * n_ranks
    return place


@pytest.mark.parametrize("n_ranks", RANKS[1:])
@pytest.mark.parametrize("name", EXACT)
def test_whole_numbers_give_the_same_bits(folder: Path, name: str, n_ranks: int) -> None:
    for file in FILES:
        expected = (folder / "1" / name / file).read_bytes()
        assert (folder / str(n_ranks) / name / file).read_bytes() == expected, file


@pytest.mark.parametrize("n_ranks", RANKS[1:])
@pytest.mark.parametrize("name", ROUNDED)
def test_floats_agree_up_to_rounding(folder: Path, name: str, n_ranks: int) -> None:
    for file in FILES[1:]:
        expected, _ = unpack_array_file(folder / "1" / name / file)
        arrays, _ = unpack_array_file(folder / str(n_ranks) / name / file)
        for key, array in expected.items():
            largest = np.abs(array.astype(np.float64)).max(initial=0.0)
            assert np.allclose(arrays[key], array, rtol=1e-6, atol=1e-6 * largest), key


def test_requests_change_something(folder: Path) -> None:
    """The runs above would agree without requests, too."""
    server, _ = unpack_array_file(folder / "2" / "fedshare" / "server.safetensors")
    clients, _ = unpack_array_file(folder / "2" / "fedshare" / "clients.safetensors")
    assert len(server["given/item"]) > 0
    assert clients["lists/parts/sharing/gone:item"].size > 0


def test_everybody_has_one_rank() -> None:
    keys = derive_keys(str(user) for user in range(4000))
    ranks = assign_ranks(keys, 4)
    assert np.bincount(ranks).min() > 900
    assert np.array_equal(ranks[1000:], assign_ranks(keys[1000:], 4))  # whoever else is there


def test_a_rank_has_its_own_people_alone() -> None:
    federation = assemble_federation(rank_runs.read_config(make_run(train={"silos": 7})["config"]), rank_runs.MACHINE)
    shards = [take_shard(federation, rank, 3) for rank in range(3)]
    users = np.concatenate([shard.users for shard in shards])
    assert np.array_equal(np.sort(users), np.arange(federation.stream.n_users))
    last = federation.stream.blocks[-1]
    n_items = [len(shard.federation.stream.blocks[-1].train.ids) for shard in shards]
    assert sum(n_items) == len(last.train.ids)


def test_single_clients_meet_in_their_order() -> None:
    def reply(senders: list[int], keys: list[int], rows: list[int], values: list[float]) -> RankReply:
        arrays = {
            "senders": np.array(senders),
            "each/rows/sender": np.array(keys, np.uint64),
            "each/rows/client": np.array(rows, np.int32),
            "each/rows/item": np.arange(len(rows), dtype=np.int32),
            "each/rows/value": np.array(values, np.float32),
            "each/dense/sender": np.array(keys, np.uint64),
            "each/dense/value": np.array(keys, np.float32)[:, None],
        }
        return RankReply({"each": ["rows", "dense"]}, arrays)

    replies = [reply([1, 4], [11, 14], [0, 0, 1], [1.0, 1.5, 4.0]), reply([0, 3], [10, 13], [0, 1, 1], [0.0, 3.0, 3.5])]
    joined = join_client_fields([*replies, RankReply({"each": []}, {"senders": np.zeros(0, np.int64)})])
    assert joined["rows"].sender.tolist() == [10, 11, 13, 14]
    rows = joined["rows"].value
    assert isinstance(rows, SparseRows)
    assert rows.client.tolist() == [0, 1, 1, 2, 2, 3]
    assert rows.value.tolist() == [0.0, 1.0, 1.5, 3.0, 3.5, 4.0]
    dense = joined["dense"].value
    assert isinstance(dense, DenseArrays)
    assert dense.value[:, 0].tolist() == [10, 11, 13, 14]


def test_masks_of_all_clients_are_refused() -> None:
    federation = assemble_federation(rank_runs.read_config(make_run()["config"]), rank_runs.MACHINE)
    train = federation.config.train.model_copy(update={"aggregator": "secure"})
    masked = replace(federation, config=federation.config.model_copy(update={"train": train}))
    check_rank_settings(masked, 1)
    with pytest.raises(TacitaError, match="'ideal', which gives the same sums"):
        check_rank_settings(masked, 2)


@pytest.mark.parametrize(
    "question",
    [
        Question("round"),
        Question("round", replay=RoundReplay(3, 0.5)),
        Question("retraction", owner="statistic", serial=(2, 1)),
    ],
)
def test_questions_come_back_as_they_were(question: Question) -> None:
    fields = json.loads(json.dumps(encode_question(question)))
    assert decode_question(fields) == question


def test_fields_come_back_as_they_were() -> None:
    specs = (Spec("rows", (60, 32), most=1e4, touched=True), Spec("scores", (60,), seen="each", least=0.0, most=1.0))
    assert decode_specs(json.loads(json.dumps(encode_specs(specs)))) == specs


@pytest.mark.parametrize("n_ranks", [0, 1000])
def test_numbers_of_ranks_that_make_no_sense_are_refused(n_ranks: int) -> None:
    with pytest.raises(TacitaError, match="--ranks"):
        check_ranks(n_ranks)


def test_only_torchrun_places_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other launchers set some of these variables, too."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert read_launcher_place() is None
    assert not is_service_rank()
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert read_launcher_place() == RankPlace(1, 1, 1, 1)
