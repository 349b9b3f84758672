"""A server and three nodes as people run them: what comes out, what is refused, what survives, what is seen.

The tests share one site and run in the order in which they stand: what they import stays on the nodes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed; pip install tacita[live]")

from live_cluster import eventually, free_port
from live_site import (
    FIRST_TIME,
    NODES,
    UP,
    Site,
    config_of,
    cpu_seconds,
    distance,
    done,
    hashes,
    home,
    items_of_blocks,
    make_data,
    person,
    rows_of_blocks,
    said,
)

from helpers.accepted_answers import list_accepted
from tacita.core.config import RunConfig
from tacita.core.draws import derive_keys
from tacita.federation.rounds import Progress, make_initial_progress, run_remaining_blocks
from tacita.live import tls_certificates
from tacita.live.node.store_file import STORE_FILE as NODE_STORE
from tacita.live.server.coordinator import STORE_FILE
from tacita.runs.assembly import Machine, assemble_federation

pytestmark = pytest.mark.live

MODELS: dict[str, dict[str, Any]] = {
    "fedavg": {"backbone": {"name": "mf", "dim": 8}, "method": "fedavg"},
    "f3crec": {"backbone": {"name": "mf", "dim": 8}, "method": "f3crec", "parts": [{"name": "replay", "top_n": 10}]},
    "tally": {"backbone": {"name": "tally", "ridge": 20.0, "min_item": 2}},
}
ROUNDS = 6  # of the runs that are broken


@dataclass
class Story:
    """The site, the data of the lab, and how the lab's blocks were played."""

    site: Site
    data: Path
    blocks: list[list[tuple[str, str, int]]]

    def config(self, name: str, rounds: int = 3) -> RunConfig:
        return config_of(self.data, rounds, **MODELS[name])


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """A server that is up and three nodes that are online, with the lab's first block and the lab's secret."""
    folder = tmp_path_factory.mktemp("site")
    data = make_data(folder)
    config = config_of(data)
    blocks, items = rows_of_blocks(config), items_of_blocks(config)
    site = Site(folder)

    def make(name: str) -> None:
        site.make_node(name, secret="")
        local = [row for row in blocks[0] if home(row[0]) == name]
        assert site.collect(name, local, "first")["new interactions"] == len(local)

    try:
        site.publish(items[0])
        at_once(make, NODES)
        site.up()
        for name in NODES:
            site.run_node(name)
        site.wait_online(*NODES)
        yield Story(site, data, blocks)
    finally:
        site.stop()


@pytest.fixture(scope="module")
def trained(story: Story) -> Story:
    """Two blocks of every model, the second one after an import into running nodes."""
    site = story.site
    pids = [site.running[name].pid for name in ("server", *NODES)]

    def collect(name: str) -> None:
        local = [row for row in story.blocks[1] if home(row[0]) == name]
        assert site.collect(name, local, "second")["new interactions"] == len(local)

    at_once(lambda name: site.train(name, story.config(name)), MODELS)
    for name in MODELS:
        site.wait(name)
    at_once(collect, NODES)
    site.publish(items_of_blocks(story.config("fedavg"))[1])
    at_once(site.next_block, MODELS)
    for name in MODELS:
        site.wait(name)
    assert pids == [site.running[name].pid for name in ("server", *NODES)]
    assert all(entry.process.poll() is None for entry in site.running.values())
    return story


def at_once(do: Callable[[str], object], names: Iterable[str]) -> None:
    """Commands of several people at the same time."""
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(do, names))


def lab(config: RunConfig) -> Progress:
    fed = assemble_federation(config, Machine())
    progress = make_initial_progress(fed)
    run_remaining_blocks(fed, progress, lambda report, now: None)
    return progress


@pytest.mark.parametrize("name", list(MODELS))
def test_three_nodes_equal_the_lab(trained: Story, name: str) -> None:
    whole, arrays = lab(trained.config(name)), trained.site.arrays(name)
    expected: dict[str, Any] = {f"now/heads/{k}": v for k, v in whole.server.heads.items()}
    if whole.server.items.size:
        expected["now/items"] = whole.server.items
    for part, state in whole.server.parts.items():
        expected |= {f"now/parts/{part}/{k}": v for k, v in state.items()}
    result = {key: distance(arrays[key], value) for key, value in expected.items()}
    print(f"\n{name}: relative difference to the lab " + ", ".join(f"{k} {v:.1e}" for k, v in sorted(result.items())))
    assert result
    assert max(result.values()) <= 1e-5
    with trained.site.store() as store:
        note = store.load_run(name).note
    assert note is not None
    for live, counterpart in zip(note["plain"]["results"], whole.results, strict=True):
        assert live["best_round"] == counterpart["best_round"]
        assert live["users"] == counterpart["users"]
        assert live["ndcg@20"] == pytest.approx(counterpart["ndcg@20"], rel=1e-4)


def test_f3crec_is_not_fedavg_by_the_second_block(trained: Story) -> None:
    """Else the parity of one would prove nothing about the other."""
    assert distance(trained.site.arrays("f3crec")["now/items"], trained.site.arrays("fedavg")["now/items"]) > 1e-3


# What the server has of people


def found_in(path: Path, people: list[str], times: np.ndarray) -> list[str]:
    """What a file gives away: raw ids, their keys, and times as text or as numbers of 8 bytes in either order."""
    content = path.read_bytes()
    known = set(people)
    results = [entry for entry in map(bytes.decode, re.findall(rb"person-[0-9a-f]{24}", content)) if entry in known]
    texts = {str(t).encode() for t in times.tolist()}
    results += [entry.decode() for entry in re.findall(rb"(?=(12345[0-9]{5}))", content) if entry in texts]
    numbers = [times.astype(kind) for kind in ("<f8", ">f8", "<i8", ">i8")]
    numbers.append(derive_keys(people))
    wanted = np.concatenate([number.view(np.uint64) for number in numbers])
    for shift in range(8):
        words = np.frombuffer(content, np.uint64, max(0, len(content) - shift) // 8, shift) if len(content) > 7 else []
        results += [hex(entry) for entry in np.asarray(words, np.uint64)[np.isin(words, wanted)].tolist()]
    return results


def test_nothing_of_a_person_is_on_the_server_or_in_a_log(trained: Story) -> None:
    site, rows = trained.site, [row for block in trained.blocks for row in block]
    people = sorted({user for user, _, _ in rows})
    times = np.array(sorted({at for _, _, at in rows}), np.int64)
    assert times[0] >= FIRST_TIME
    assert times[-1] < 1_234_600_000
    files = [path for path in site.server.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {STORE_FILE, f"{STORE_FILE}-wal", "link.db", "superlink.log"} <= names
    logs = [site.folder / f"{name}.log" for name in ("server", *NODES)]
    logs += [site.folder / name / "flower" / "client.log" for name in NODES]
    for path in files + logs:
        if path.exists():
            assert not found_in(path, people, times)[:3], path
    print(f"\nnothing found in {sum(path.stat().st_size for path in files):,} bytes of {len(files)} files")
    for name in NODES:  # the search finds what is there
        own_values = sorted({user for user, _, _ in rows if home(user) == name})
        results = {
            entry
            for end in ("", "-wal")
            for entry in found_in(site.folder / name / f"{NODE_STORE}{end}", people, times)
        }
        assert set(own_values) <= results
        assert any(entry.startswith("0x") for entry in results)
    csv = site.folder / f"{NODES[0]}-first.csv"
    assert any(entry.startswith("12345") for entry in found_in(csv, people, times))


# What is broken goes on as if nothing had happened


@dataclass
class Cost:
    """What an unbroken run took."""

    exchanges: int
    seconds: float  # of the rounds after the first
    rounds: int  # that these seconds are of
    trained: list[float]  # seconds in the daemon per request, rounded to tenths
    cpu: dict[str, float]
    startup: float


@pytest.fixture(scope="module")
def whole(trained: Story) -> Cost:
    """An unbroken run under the name 'whole', and what it cost."""
    site = trained.site

    def cpu() -> dict[str, float]:
        """Of what runs all the time: a coordinator lives for one run."""
        passing = set(site.running["server"].of("flwr-serverapp"))
        return {
            name: sum(cpu_seconds(pid) for pid in {entry.pid, *entry.family()} - passing)
            for name, entry in site.running.items()
        }

    before, logs = cpu(), {name: len(site.running[name].text()) for name in NODES}
    site.train("whole", trained.config("fedavg", ROUNDS))
    site.wait("whole")
    after = cpu()
    rounds = site.events("whole", "round")
    reports = [re.findall(r" \(([0-9.]+) s\):", site.running[name].text()[logs[name] :]) for name in NODES]
    return Cost(
        2 * ROUNDS + 1,
        rounds[-1]["seconds"] - rounds[0]["seconds"],
        len(rounds) - 1,
        [float(element) for each in reports for element in each],
        {name: after[name] - before[name] for name in after},
        rounds[0]["seconds"],
    )


def test_round_costs_are_reported(whole: Cost) -> None:
    exchange = whole.seconds / whole.rounds / 2
    training = float(np.mean(whole.trained))
    print(
        f"\na round of two exchanges at 3 nodes: {2 * exchange:.2f} s, an exchange {exchange:.2f} s, of which the node "
        f"works {training:.2f} s; overhead {exchange - training:.2f} s (Flower's own floor: about 6 s)"
    )
    spent = {name: whole.cpu[name] / whole.exchanges for name in NODES}
    print(
        "CPU per message, training included: "
        + ", ".join(f"{name} {entry:.2f} s" for name, entry in spent.items())
        + f"; of gateway and SuperLink per exchange {whole.cpu['server'] / whole.exchanges:.2f} s"
    )
    assert len(whole.trained) == 3 * whole.exchanges
    assert max(spent.values()) - training < 2.0
    assert exchange - training < 6.0


def same_as_whole(story: Story, run: str) -> None:
    """Bit for bit the model of the unbroken run, each answer counted once, each release written down once."""
    site = story.site
    own_values, unbroken = site.arrays(run), site.arrays("whole")
    assert own_values.keys() == unbroken.keys()
    assert [key for key in own_values if not np.array_equal(own_values[key], unbroken[key])] == []
    with site.store() as store:
        counted = list_accepted(store, run)
        assert counted == list_accepted(store, "whole")
        assert store.load_run(run).note == store.load_run("whole").note
    assert len(counted) == len({row[:4] for row in counted}) == 3 * (2 * ROUNDS + 1)
    for name in NODES:
        assert sorted(site.ledger(name, run)) == sorted(site.ledger(name, "whole")), name
    rounds = [(event["block"], event["round"]) for event in site.events(run, "round")]
    assert rounds == [(0, n + 1) for n in range(ROUNDS)]


def wait_answered(site: Site, name: str, run: str, least: int) -> int:
    """Until a node has answered a round that the server has not committed; the number of that round."""
    found = -1

    def answered() -> bool:
        nonlocal found
        found = site.rounds_done(run)
        return found >= least and (0, found, "round") in site.ledger(name, run)

    eventually(answered, 180, f"an answer of {name} in round {least + 1} or later")
    return found


def test_a_killed_server_goes_on_with_the_same_numbers(trained: Story, whole: Cost) -> None:
    site, run = trained.site, "server-killed"
    site.train(run, trained.config("fedavg", ROUNDS))
    # Everything at once, after a node has answered and before the round is committed
    round = wait_answered(site, "cinema", run, 1)
    site.running["server"].kill(whole=True)
    assert site.rounds_done(run) == round, "the kill came too late to be within the round"
    site.up()
    eventually(lambda: site.rounds_done(run) > round, 120, "the next round")
    # Only the process that was started by hand: the others must end by themselves
    old = site.running["server"]
    below = old.family()
    assert len(below) >= 2
    old.kill(whole=False)
    assert site.rounds_done(run) < ROUNDS
    began = time.monotonic()
    eventually(lambda: not old.family(), 15, "what the killed server had started is gone")
    print(f"\nnothing runs {time.monotonic() - began:.1f} s after only `server up` was killed")
    site.up()
    observations = site.rounds_done(run)
    eventually(lambda: site.rounds_done(run) > observations, 120, "the next round")
    # Only the coordinator
    coordinators = site.running["server"].of("flwr-serverapp")
    assert coordinators
    assert site.rounds_done(run) < ROUNDS
    for pid in coordinators:
        os.kill(pid, signal.SIGKILL)
    site.wait(run)
    same_as_whole(trained, run)


def test_a_killed_node_loses_nothing_and_is_counted_once(trained: Story, whole: Cost) -> None:
    site, run = trained.site, "node-killed"
    site.train(run, trained.config("fedavg", ROUNDS))
    wait_answered(site, "cinema", run, 0)
    # Just after an import was acknowledged
    fresh = [(user, "not-published", FIRST_TIME) for user in sorted({u for u, _, _ in trained.blocks[0]})]
    fresh = [row for row in fresh if home(row[0]) == "cinema"]
    assert site.collect("cinema", fresh, "acknowledged")["new interactions"] == len(fresh)
    site.running["cinema"].kill(whole=True)
    assert site.rounds_done(run) < ROUNDS
    site.run_node("cinema")
    state = site.rows(
        "cinema", "SELECT u.raw FROM interactions i JOIN users u ON u.id = i.user WHERE item = 'not-published'"
    )
    assert sorted(user for (user,) in state) == [user for user, _, _ in fresh]
    site.wait_online("cinema")
    # After it has committed its answer, before the round is over
    round = wait_answered(site, "school", run, site.rounds_done(run) + 1)
    site.running["school"].kill(whole=True)
    assert site.rounds_done(run) == round, "the kill came too late to be within the round"
    site.run_node("school")
    eventually(lambda: site.rounds_done(run) > round, 120, "the round is repeated")
    # While it works on an answer: the others have given theirs
    os.kill(site.running["library"].pid, signal.SIGSTOP)
    own_values = set(site.ledger("library", run))
    others = ("cinema", "school")
    eventually(lambda: all(set(site.ledger(name, run)) - own_values for name in others), 180, "the others answer")
    time.sleep(1.5)  # its client has fetched the question by now
    site.running["library"].kill(whole=False)
    assert set(site.ledger("library", run)) == own_values
    assert site.rounds_done(run) < ROUNDS
    site.run_node("library")
    site.wait(run)
    same_as_whole(trained, run)


# Who is let in


def test_those_who_are_not_enrolled_are_refused_in_plain_words(story: Story, tmp_path: Path) -> None:
    site = story.site
    site.make_node("stranger", enroll=False)
    site.make_node("misled")
    tls_certificates.make_ca(tmp_path)
    (site.folder / "misled" / "ca.pem").write_bytes((tmp_path / "ca.pem").read_bytes())
    try:
        for name in ("stranger", "misled"):
            site.run_node(name)
        stranger = site.wait_connection("stranger", lambda now: "does not know this node's key" in now)
        misled = site.wait_connection("misled", lambda now: "certificate is not signed by this node's authority" in now)
        print(f"\nunknown key: {stranger}\nwrong CA: {misled}")
        shown = json.loads(done("node", "status", "--folder", site.folder / "stranger", "--json"))
        assert "ask its operator to enrol it" in shown["connection"]
    finally:
        for name in ("stranger", "misled"):
            site.running.pop(name).stop()
        done("server", "revoke", "misled", "--folder", site.server)
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"http://127.0.0.1:{site.port}/v1/fleet/activate-node", trust_env=False)
    trust = ssl.create_default_context(cafile=str(site.server / "ca.pem"))
    with httpx.Client(verify=trust, trust_env=False) as client:
        for call in ("control/start-run", "control/register-node", "control/list-nodes", "runtime/acquire-task"):
            got = client.post(f"https://127.0.0.1:{site.port}/v1/{call}", content=b"")
            assert (got.status_code, got.text) == (403, "this call is not for nodes")
        assert client.post(f"https://127.0.0.1:{site.port}/v1/fleet/activate-node", content=b"").status_code == 401


def test_a_late_node_takes_part_in_the_next_block_until_it_is_revoked(trained: Story) -> None:
    site = trained.site
    site.make_node("late")
    rows = [(person(f"late {user}"), item, at) for user, item, at in trained.blocks[0] if home(user) == "library"]
    assert site.collect("late", rows, "first")["new users"] >= 20
    items = items_of_blocks(trained.config("tally"))[1]
    have = {(user, item) for block in trained.blocks for user, item, _ in block}

    def collect(name: str) -> None:
        people = sorted({user for user, _ in have if home(user) == name})
        fresh = [(user, item, FIRST_TIME) for user in people for item in items[:20] if (user, item) not in have]
        assert site.collect(name, fresh, "third")["new interactions"] == len(fresh)

    at_once(collect, NODES)
    site.run_node("late")
    site.wait_online("late")
    site.next_block("tally")
    site.wait("tally")
    with site.store() as store:
        number = {row.name: row.number for row in store.list_nodes()}
        took_part = {(block, node) for block, _, kind, node, _ in list_accepted(store, "tally") if kind == "statistic"}
    assert took_part == {(b, number[name]) for b in (0, 1, 2) for name in NODES} | {(2, number["late"])}
    shown = json.loads(done("node", "recommend", rows[0][0], "-k", 5, "--folder", site.folder / "late", "--json"))
    assert len(shown) == 5
    assert all(entry["title"] == f"Title of {entry['item']}" for entry in shown)

    done("server", "revoke", "late", "--folder", site.server)
    why = site.wait_connection("late", lambda now: now.startswith("waiting"))
    assert "does not know this node's key" in why
    print(f"\nrevoked: {why}")
    assert "does not know" in done("node", "status", "--folder", site.folder / "late")
    site.train("after", trained.config("tally"))
    site.wait("after")
    with site.store() as store:
        assert {node for *_, node, _ in list_accepted(store, "after")} == {number[name] for name in NODES}
    states = {
        entry["name"]: entry["state"]
        for entry in json.loads(done("server", "status", "--folder", site.server, "--json"))["nodes"]
    }
    assert states["late"] == "revoked"
    assert {states[name] for name in NODES} == {"enrolled"}
    site.running.pop("late").stop()


# Bad input: one sentence, nothing lost


def test_folders_and_ports_in_use_are_refused(story: Story, tmp_path: Path) -> None:
    site = story.site
    assert "another process has" in said("node", "run", "--folder", site.folder / NODES[0])
    assert "is up already" in said(*UP, "--folder", site.server)
    for option, port in (("--port", site.port), ("--link-port", site.link_port)):
        folder = tmp_path / option
        ports = {"--port": free_port(), "--link-port": free_port()} | {option: port}
        done("server", "init", folder, "--host", "127.0.0.1", *(word for pair in ports.items() for word in pair))
        before = hashes(folder)
        assert f"port {port} is in use" in said(*UP, "--folder", folder)
        assert before.items() <= hashes(folder).items()
    site.wait_online(*NODES)
