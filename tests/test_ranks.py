"""One run on 1, 2 and 4 ranks: the same bits with whole numbers, the same numbers up to rounding with floats."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tacita
from frozen import ADAM, DATA, INTEREST, LIPM, MATCHED, MF
from helpers import rank_runs
from tacita.core.codec import unpack_array_file
from tacita.core.draws import derive_keys
from tacita.core.errors import TacitaError
from tacita.core.types import AnyArray, Doubles, Longs, RoundReplay
from tacita.data.shards.placement import assign_places
from tacita.federation.ranks.broadcast_codec import decode_question, decode_specs, encode_question, encode_specs
from tacita.federation.ranks.client_fields import join_client_fields
from tacita.federation.ranks.process_group import RankLost, open_launched_group
from tacita.federation.ranks.rank_messages import MessageChannel, RankMessage, RankReply, describe_problem
from tacita.federation.ranks.rank_place import RankPlace, read_launcher_place
from tacita.federation.ranks.rank_team import RankTeam, compare_ranks, describe_rank
from tacita.federation.ranks.sharded_devices import check_rank_settings
from tacita.federation.ranks.shards import take_shard
from tacita.messages import DenseArrays, SparseRows, Spec
from tacita.round.question import Question
from tacita.runs import ranks as rank_processes
from tacita.runs.assembly import Machine, assemble_federation
from tacita.runs.ranks import check_ranks, is_service_rank, open_ranks

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
    "plain tally under a budget": make_run(
        False, backbone={"name": "tally-order"}, privacy={"epsilon": 20.0, "reproducible_noise": True}
    ),
}
ROUNDED = {
    "plain fedavg": make_run(False, method="fedavg"),
    "plain f3crec": make_run(False, method="f3crec"),
    "plain tally": make_run(False, backbone={"name": "tally"}),
}
RANKS = (1, 2, 4)
MOST_SECONDS = 1800.0  # for all runs on one number of ranks, on a busy machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs on every number of ranks; processes start once for all runs."""
    place = tmp_path_factory.mktemp("ranks")
    for n_ranks in RANKS:
        processes = rank_runs.start_ranks(place, n_ranks, EXACT | ROUNDED)
        assert rank_runs.wait_for_ranks(processes, MOST_SECONDS) == [0] * n_ranks
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
    ranks = assign_places(keys, 4)
    assert np.bincount(ranks).min() > 900
    assert np.array_equal(ranks[1000:], assign_places(keys[1000:], 4))  # whoever else is there


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


def test_hosts_want_an_interface_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks exchange is not encrypted."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(TacitaError, match="--rank-interface"):
        open_launched_group(RankPlace(0, 2, 0, 1), None)
    with pytest.raises(TacitaError, match="this machine has"):
        open_launched_group(RankPlace(0, 2, 0, 1), "no-such-network")


def test_a_rank_that_fails_ends_the_others() -> None:
    """Else they wait for it, and the test for them."""
    scripts = ["raise SystemExit(3)", "import time; time.sleep(600)"]
    processes = [subprocess.Popen([sys.executable, "-c", script]) for script in scripts]
    assert rank_runs.wait_for_ranks(processes, 60) == [3, None]
    assert processes[1].returncode is not None


# what ranks say to each other


class ThreadGroup:
    """One of two ranks in this process, each in a thread of its own."""

    def __init__(self, rank: int, inboxes: Sequence[queue.Queue[Any]]) -> None:
        self.rank = rank
        self.size = 2
        self.place = RankPlace(rank, 2, rank, 2)
        self.n_arrays = 0  # that this rank sent to all
        self.is_abandoned = False
        self._inbox = inboxes[rank]
        self._outbox = inboxes[1 - rank]

    def _take(self) -> Any:
        return self._inbox.get(timeout=60)

    def broadcast_bytes(self, content: bytes | None = None) -> Any:
        if content is None:
            return self._take()
        self._outbox.put(content)
        return content

    def broadcast_array(self, array: AnyArray) -> None:
        if self.rank == 0:
            self.n_arrays += 1
            self._outbox.put(array.copy())
        else:
            array[...] = self._take()

    def share_numbers(self, numbers: Sequence[int]) -> Longs:
        self._outbox.put(list(numbers))
        rows = [list(numbers), self._take()]
        return np.array(rows if self.rank == 0 else rows[::-1])

    def send_bytes(self, content: bytes, rank: int) -> None:
        self._outbox.put(content)

    def receive_bytes(self, length: int, rank: int) -> Any:
        content = self._take()
        assert len(content) == length
        return content

    def send_array(self, array: AnyArray, rank: int) -> None:
        self._outbox.put(array.copy())

    def receive_array(self, array: AnyArray, rank: int) -> None:
        array[...] = self._take()

    def add_up(self, arrays: Sequence[Doubles]) -> None:
        for array in arrays:
            if self.rank == 1:
                self._outbox.put(array)
            else:
                array += self._take()

    def abandon(self) -> None:
        self.is_abandoned = True

    def call_roll(self) -> list[int]:
        return [1, 5]


def open_channels(serve: Callable[[MessageChannel], None]) -> tuple[MessageChannel, Any, threading.Thread]:
    """The channel of rank 0 and its group; `serve`: what rank 1 does in its thread."""
    inboxes: list[queue.Queue[Any]] = [queue.Queue(), queue.Queue()]
    groups: list[Any] = [ThreadGroup(rank, inboxes) for rank in range(2)]
    thread = threading.Thread(target=serve, args=(MessageChannel(groups[1]),), daemon=True)
    thread.start()
    return MessageChannel(groups[0]), groups[0], thread


def test_after_a_problem_ranks_go_on_together() -> None:
    """Nobody adds anything, and all wait for the next message."""

    def serve(channel: MessageChannel) -> None:
        channel.receive()
        channel.report_problem(describe_problem(TacitaError("there is no such file.")))
        for _ in range(2):
            channel.receive()
            channel.send_reply(RankReply({"rank": 1}, sums=(np.ones(3),)))

    channel, _, thread = open_channels(serve)
    channel.send(RankMessage("first"))
    assert not channel.is_idle
    with pytest.raises(TacitaError, match="there is no such file"):
        channel.gather_replies(RankReply(sums=(np.ones(3),)))
    assert channel.is_idle
    channel.send(RankMessage("second"))
    channel.discard_replies()
    assert channel.is_idle
    channel.send(RankMessage("third"))
    replies = channel.gather_replies(RankReply(sums=(np.ones(3),)))
    assert [reply.fields for reply in replies] == [{}, {"rank": 1}]
    assert replies[0].sums[0].tolist() == [2.0, 2.0, 2.0]
    thread.join(60)


def test_arrays_travel_when_they_are_new() -> None:
    received = []

    def serve(channel: MessageChannel) -> None:
        for _ in range(3):
            received.append(channel.receive().arrays["server/items"])

    channel, group, thread = open_channels(serve)
    items = np.arange(6.0)
    for array in (items, items.copy(), items + 1):
        channel.send(RankMessage("round", arrays={"server/items": array}))
    thread.join(60)
    assert group.n_arrays == 2
    assert [array[0] for array in received] == [0.0, 0.0, 1.0]


def test_a_team_in_the_middle_of_something_sends_nothing_more() -> None:
    """Others would take it for what they wait for."""
    group: Any = ThreadGroup(0, [queue.Queue(), queue.Queue()])
    team = RankTeam(lambda: group)
    team.open().is_idle = False
    team.close()
    assert group.is_abandoned
    assert group._outbox.empty()


def test_lost_ranks_are_named_in_a_sentence() -> None:
    group: Any = ThreadGroup(0, [queue.Queue(), queue.Queue()])
    team = RankTeam(lambda: group, lambda: [1])
    team.open()
    assert str(team.explain_loss(RankLost("silence."), "go on")) == (
        "rank 1 of 2 has ended or does not answer, so the run stopped; go on."
    )
    group.size = 8
    team = RankTeam(lambda: group)
    team.open()
    assert str(team.explain_loss(RankLost("silence."), "go on")) == (
        "ranks 1 and 5 of 8 have ended or do not answer, so the run stopped; go on."
    )


def test_ranks_that_would_compute_something_else_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    place = RankPlace(0, 2, 0, 2)
    federations = []
    for method in ("fedavg", "f3crec"):
        config = rank_runs.read_config(make_run(method=method)["config"])
        federations.append(assemble_federation(config, rank_runs.MACHINE))
    own = describe_rank(place, federations[0])
    compare_ranks([own, describe_rank(place, federations[0])])
    with pytest.raises(TacitaError, match="rank 1 has other parts or fields"):
        compare_ranks([own, describe_rank(place, federations[1])])
    with pytest.raises(TacitaError, match="rank 2 reads other data"):
        compare_ranks([own, own, {**own, "data": "another"}])
    monkeypatch.setattr(tacita, "__version__", "0.0.0")
    with pytest.raises(TacitaError, match="rank 1 has another version of tacita"):
        compare_ranks([own, describe_rank(place, federations[0])])


# processes


@pytest.fixture
def sleepers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[subprocess.Popen[bytes]]:
    """Ranks that never do anything, as they are started; the folder where they meet is in `tmp_path`."""
    processes: list[subprocess.Popen[bytes]] = []
    start_process = subprocess.Popen

    def start_sleeper(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if len(processes) == 2:
            raise OSError("no more processes")
        process: subprocess.Popen[bytes] = start_process([sys.executable, "-c", "import time; time.sleep(600)"])
        processes.append(process)
        return process

    monkeypatch.setattr(rank_processes.subprocess, "Popen", start_sleeper)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return processes


def assert_ended(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    assert processes
    assert all(process.returncode is not None for process in processes)
    assert list(folder.iterdir()) == []


def test_ranks_that_nobody_needed_are_not_waited_for(sleepers: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """A finished run that is resumed shares nothing out."""
    began = time.monotonic()
    with open_ranks(2, None, Machine(1), ["train"]):
        assert len(list(tmp_path.iterdir())) == 1
    assert time.monotonic() - began < rank_processes._END_SECONDS
    assert_ended(sleepers, tmp_path)


def test_a_rank_that_cannot_start_ends_the_others(sleepers: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no more processes"), open_ranks(4, None, Machine(1), ["train"]):
        pass
    assert len(sleepers) == 2
    assert_ended(sleepers, tmp_path)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
def test_sigterm_ends_ranks_and_removes_their_folder(sleepers: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_ranks(2, None, Machine(1), ["train"]):
        signal.raise_signal(signal.SIGTERM)
    assert_ended(sleepers, tmp_path)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
