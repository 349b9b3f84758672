"""Secure sums: masks that cancel, sums that stay closed, bounds of rounding, runs that give what exact sums give."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

import tacita
from helpers.oracle import federate, make_backbone, started
from helpers.private_federation import crowd_stream, federate_parts, serving_broadcast
from tacita.core.errors import TacitaError
from tacita.messages import (
    QUANTUM,
    DenseArrays,
    SparseRows,
    Spec,
    Total,
    Upload,
    add_upload,
    empty_total,
    make_accumulator,
    touched_name,
)
from tacita.privacy import secure_sum as sums
from tacita.privacy.secure_sum import (
    BOUND,
    SecureSumClient,
    SecureSumServer,
    assign_neighbours,
    quantise_values,
    run_secure_sum,
)
from tacita.round.plan import Federation
from tacita.round.question import Question

RUN: dict[str, Any] = {"data": "synthetic:users=40,items=50,per_user=12,groups=4", "backbone": {"name": "mf", "dim": 4}}


def open_enough(graph: list[list[int]], answered: set[int], stay: set[int]) -> bool:
    """By hand: whether everybody whose mask or key is needed has more than half of their neighbours left to tell."""
    touched = {u for u in range(len(graph)) if u in answered or answered & set(graph[u])}
    enough = all(2 * len(stay & set(graph[u])) > len(graph[u]) for u in touched)
    return enough and all(2 * len(answered & set(graph[u])) > len(graph[u]) for u in stay)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_masks_cancel_despite_dropouts_and_too_few_shares_open_nothing(data: st.DataObject) -> None:
    """H.G.1: the plain sum of those who answered, or a refusal; never anything else, whoever drops out when."""
    n = data.draw(st.integers(3, 24))
    seed = data.draw(st.integers(0, 2**20))
    share = data.draw(st.sampled_from([0.0, 0.1, 0.3, 0.6]))
    rng = np.random.default_rng(seed)
    order = rng.permutation(n).tolist()
    numbers = [rng.integers(-BOUND, BOUND + 1, 17) for _ in range(n)]
    answered = set(np.flatnonzero(rng.random(n) >= share).tolist())
    stay = {u for u in answered if rng.random() >= share / 3}
    counterpart = [number if u in answered else None for u, number in enumerate(numbers)]
    if not answered:
        return
    if open_enough(assign_neighbours(n, order), answered, stay):
        result = run_secure_sum(counterpart, answered - stay, order).sum
        assert np.array_equal(result, np.sum([numbers[u] for u in answered], axis=0))
        assert len(stay) * 2 > len(assign_neighbours(n, order)[0])  # nobody's sum is opened by few
    else:
        with pytest.raises(TacitaError, match="the sum was not opened"):
            run_secure_sum(counterpart, answered - stay, order)


def test_neighbours_are_mutual_and_as_many_for_everybody() -> None:
    for n in (3, 7, 20, 50):
        graph = assign_neighbours(n, np.random.default_rng(n).permutation(n).tolist())
        assert all(u in graph[v] for u in range(n) for v in graph[u])
        assert len({len(entry) for entry in graph}) == 1
        assert all(u not in entry for u, entry in enumerate(graph))
    assert len(assign_neighbours(50, range(50))[0]) == 12


def met(n: int, order: list[int]) -> tuple[list[SecureSumClient], SecureSumServer, list[dict[int, bytes]]]:
    server, clients = SecureSumServer(assign_neighbours(n, order)), [SecureSumClient(u) for u in range(n)]
    server.keyrings = {u: client.make_keyring() for u, client in enumerate(clients)}
    sealed = [entry.share_secrets({v: server.keyrings[v] for v in server.graph[u]}) for u, entry in enumerate(clients)]
    return clients, server, sealed


def masked(n: int, numbers: np.ndarray) -> tuple[list[SecureSumClient], SecureSumServer, list[np.ndarray]]:
    clients, server, sealed = met(n, list(range(n)))
    uploads = []
    for u, client in enumerate(clients):
        uploads.append(client.mask_numbers({v: sealed[v][u] for v in server.graph[u]}, numbers[u]))
        server.add_upload(u, uploads[-1])
    return clients, server, uploads


def uniform(upload: np.ndarray) -> float:
    counts = Counter(upload.tobytes())
    return float(chisquare([counts[k] for k in range(256)]).pvalue)


def test_masked_upload_is_uniform() -> None:
    """H.G.1: bytes of an upload of all zeros are uniform; those of the numbers themselves, and of the sum, are not."""
    numbers = np.zeros((5, 40_000), np.int64)
    numbers[1] = np.random.default_rng(0).integers(-(2**20), 2**20, 40_000)
    _, server, uploads = masked(5, numbers)
    assert min(uniform(upload) for upload in uploads) > 1e-4
    for number in range(5):  # nor is any sum of less than all of them
        assert uniform(server.masked_sum - uploads[number]) > 1e-4
    assert uniform(numbers[1]) < 1e-9
    assert len({upload.tobytes() for upload in uploads}) == 5


def test_masks_are_never_drawn_twice() -> None:
    first, repeat = (masked(3, np.zeros((3, 8), np.int64))[2] for _ in range(2))
    assert not any(np.array_equal(a, b) for a in first for b in repeat)


def test_client_never_reveals_both_shares() -> None:
    """The share of a neighbour's own mask if it answered, of its key if not; and no second answer to another story."""
    clients, _, _ = masked(5, np.zeros((5, 3), np.int64))
    all_users = frozenset(range(5))
    report = clients[0].reveal_shares(all_users)
    assert clients[0].reveal_shares(all_users) == report
    with pytest.raises(TacitaError, match="asked twice"):
        clients[0].reveal_shares(all_users - {2})
    other = clients[1].reveal_shares(all_users - {2})
    received_shares = clients[1]._received_shares
    assert other[2] == (received_shares[2][0], received_shares[2][2])
    assert other[3] == (received_shares[3][0], received_shares[3][1])
    with pytest.raises(TacitaError, match="not opened"):
        clients[3].reveal_shares(frozenset({0, 3}))


def test_few_shares_reveal_nothing_of_a_seed() -> None:
    clients, server, _ = masked(5, np.zeros((5, 3), np.int64))
    revealed = {
        u: clients[u].reveal_shares(frozenset(range(5))) for u in (0, 1)
    }  # two of the four neighbours of client 2
    with pytest.raises(TacitaError, match="not opened"):
        server._recover_seed(2, revealed)
    from Crypto.Protocol.SecretSharing import Shamir

    assert bytes(Shamir.combine([revealed[0][2], revealed[1][2]])) != clients[2]._self_mask_seed


def test_altered_messages_and_wrong_shares_open_nothing() -> None:
    clients, server, sealed = met(4, list(range(4)))
    letters = {v: sealed[v][0] for v in server.graph[0]}
    broken = {**letters, 1: letters[1][:-1] + bytes([letters[1][-1] ^ 1])}
    with pytest.raises(TacitaError, match="changed on its way"):
        clients[0].mask_numbers(broken, np.zeros(3, np.int64))
    with pytest.raises(TacitaError, match="heard nothing"):
        clients[0].mask_numbers({1: letters[1]}, np.zeros(3, np.int64))
    for missing, words in ((None, "masks are left"), (3, "do not fit together")):
        clients, server, sealed = met(4, list(range(4)))
        for u in range(4):
            if u != missing:
                server.add_upload(
                    u, clients[u].mask_numbers({v: sealed[v][u] for v in server.graph[u]}, np.zeros(64, np.int64))
                )
        revealed = {
            u: dict(clients[u].reveal_shares(frozenset(server.respondents))) for u in sorted(server.respondents)
        }
        victim = 0 if missing is None else missing
        for report in revealed.values():
            if victim in report:
                report[victim] = (report[victim][0], bytes(16))
        with pytest.raises(TacitaError, match=words):
            server.unmask_sum(revealed)


@pytest.mark.parametrize(("n", "words"), [(2, "3 to 50 clients"), (51, "51 were asked")])
def test_too_few_and_too_many_clients_are_refused(n: int, words: str) -> None:
    with pytest.raises(TacitaError, match=words):
        run_secure_sum([np.zeros(2, np.int64)] * n)


def test_too_many_numbers_are_refused_before_any_is_masked() -> None:
    with pytest.raises(TacitaError, match="more than this simulation holds"):
        run_secure_sum([np.broadcast_to(np.int64(0), (2**25,))] * 3)


def test_without_its_libraries_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "find_spec", lambda name: None if name == "Crypto" else object())
    with pytest.raises(TacitaError, match=r"needs pycryptodome: run pip install 'tacita\[secure\]'"):
        tacita.train(**RUN, train={"rounds": 1, "aggregator": "secure"})


# rounding and overflow (H.G.2)


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 12), st.integers(0, 1000), st.sampled_from([1e-6, 1.0, 1e4]))
def test_a_sum_is_off_by_half_a_quantum_per_client_at_most(n: int, seed: int, size: float) -> None:
    values = np.random.default_rng(seed).normal(size=(n, 11)) * size
    result = run_secure_sum([quantise_values(value, QUANTUM) for value in values]).sum * QUANTUM
    assert (np.abs(result - values.sum(axis=0)) <= n * QUANTUM / 2 + 1e-9 * size).all()


@pytest.mark.parametrize("bad", [BOUND * QUANTUM + 1, -BOUND * QUANTUM - 1, np.nan, np.inf, 1e300])
def test_possible_overflow_is_refused(bad: float) -> None:
    with pytest.raises(TacitaError, match="nothing was sent"):
        quantise_values(np.array([0.0, bad]), QUANTUM)


def test_devices_look_at_their_bound_before_they_mask() -> None:
    clients, server, sealed = met(3, [0, 1, 2])
    for bad in (BOUND + 1, -BOUND - 1, -(2**63), 2**63 - 1):
        with pytest.raises(TacitaError, match="nothing was sent"):
            clients[0].mask_numbers({v: sealed[v][0] for v in server.graph[0]}, np.array([0, bad]))
    most = [np.array([BOUND, -BOUND])] * 50
    assert run_secure_sum(most).sum.tolist() == [50 * BOUND, -50 * BOUND]  # the most there can be
    assert 50 * BOUND < 2**53


# weighted means (H.G.3), totals and runs


def uploads(rng: np.random.Generator, n: int = 6, n_items: int = 9) -> tuple[Upload, list[Spec]]:
    client = np.repeat(np.arange(n, dtype=np.int32), 3)
    item = np.concatenate([rng.choice(n_items, 3, replace=False) for _ in range(n)]).astype(np.int32)
    rows = SparseRows(client, item, rng.normal(size=(3 * n, 4)).astype(np.float32))
    weight = rng.random(n) + 0.01
    weight[2] = 0.0  # dropped out
    values = {"rows": rows, "heads/a": DenseArrays(rng.normal(size=(n, 5)).astype(np.float32))}
    fields = [Spec("rows", (n_items, 4), touched=True), Spec("heads/a", (5,))]
    return Upload(values, weight, np.arange(n, dtype=np.uint64)), fields


def totalled(how: Any, upload: Upload, fields: list[Spec]) -> Total:
    adder = make_accumulator(how, fields)
    adder.add(upload, False)
    return adder.compute_total()


def test_masked_weights_give_the_weighted_mean() -> None:
    """H.G.3: clients send [s, s d] and the server divides; with weights of any kind, to the error of rounding."""
    upload, fields = uploads(np.random.default_rng(4))
    total = totalled("secure", upload, fields)
    head = upload.values["heads/a"]
    assert isinstance(head, DenseArrays)
    mean = (upload.weight[:, None] * head.value).sum(axis=0) / upload.weight.sum()
    assert np.abs(total["heads/a"] / total.weight - mean).max() < 20 * QUANTUM
    assert total.weight == pytest.approx(upload.weight.sum(), abs=6 * QUANTUM)
    plain = add_upload(empty_total(fields), upload, fields)
    for name in (*total.sums, touched_name("rows")):
        assert np.abs(total[name] - plain[name]).max() < 6 * QUANTUM
    assert total.n_clients == 5


def same(one: Total, other: Total) -> bool:
    assert one.sums.keys() == other.sums.keys()
    sums = all(one[name].tobytes() == other[name].tobytes() for name in one.sums)
    return sums and (one.weight, one.n_clients) == (other.weight, other.n_clients)


@pytest.mark.parametrize("seed", range(5))
def test_secure_and_exact_sums_are_the_same_bit_for_bit(seed: int) -> None:
    upload, fields = uploads(np.random.default_rng(seed))
    assert same(totalled("secure", upload, fields), totalled("ideal", upload, fields))
    assert not same(totalled("secure", upload, fields), totalled("plain", upload, fields))


def test_chunks_of_clients_make_one_sum() -> None:
    upload, fields = uploads(np.random.default_rng(1))
    rows, head = upload.values["rows"], upload.values["heads/a"]
    adder = make_accumulator("secure", fields)
    for some in (np.arange(2), np.arange(2, 6)):
        values = {"rows": rows.take_clients(some), "heads/a": head.take_clients(some)}
        adder.add(replace(upload, values=values, weight=upload.weight[some], sender=upload.sender[some]), False)
    assert same(adder.compute_total(), totalled("secure", upload, fields))
    assert 8 * 5 * (9 * 4 + 9 + 5 + 1) < adder.n_bytes < 3 * 8 * 5 * 51  # of five who sent everything, and keys


def test_where_nobody_sends_anything_there_is_nothing_to_open() -> None:
    upload, fields = uploads(np.random.default_rng(1))
    total = totalled("secure", upload.drop_clients(np.ones(6, bool)), fields)
    assert (total.n_clients, total.weight, float(np.abs(total["rows"]).sum())) == (0, 0.0, 0.0)
    with pytest.raises(TacitaError, match="not opened"):
        totalled("secure", upload.drop_clients(np.arange(6) > 1), fields)


TRAIN: dict[str, dict[str, Any]] = {"mf": {"rounds": 2}, "neumf": {"rounds": 1}, "tally": {}}
WHOLES = {"name": "dpps", "noise_on": "wholes", "between": 0.0}


@pytest.mark.parametrize(("backbone", "parts"), [("mf", []), ("neumf", []), ("tally", []), ("mf", [WHOLES])])
def test_a_secure_run_is_an_ideal_run_bit_for_bit(backbone: str, parts: list[dict[str, Any]]) -> None:
    totals, results = [], []
    for how in ("ideal", "secure"):
        fed = federate_parts(*parts, stream=crowd_stream(12), backbone=backbone, aggregator=how)
        progress = started(fed)
        totals.append(
            progress.devices.exchange(fed, progress.server, serving_broadcast(fed, progress), Question("round")).total
        )
        plan = {**TRAIN[backbone], "aggregator": how}
        run = tacita.train(**{**RUN, "backbone": {"name": backbone}}, parts=parts, train=plan)
        results.append([{k: v for k, v in block.items() if k != "bytes_up"} for block in run.result["blocks"]])
    assert same(*totals)
    assert results[0] == results[1]


def test_settings_incompatible_with_masking_are_refused_before_writing(tmp_path: Path) -> None:
    fed: Federation = federate(crowd_stream(), make_backbone("mf"), rounds=1, batch_size=8, aggregator="secure")
    fields = [Spec("psi", (1,), seen="each"), Spec("matcher.vector", (2,), seen="each")]
    with pytest.raises(TacitaError, match="'psi' is of each client"):
        make_accumulator(fed.config.train.aggregator, fields, ["matcher."])
    make_accumulator("secure", fields[1:], ["matcher."])
    with pytest.raises(TacitaError, match="predictions are never summed"):
        tacita.train(**RUN, method="fedkdrec", train={"aggregator": "secure"})
    many = {**RUN, "data": RUN["data"].replace("40", "60")}
    with pytest.raises(TacitaError, match="60 were asked"):
        tacita.train(**many, train={"rounds": 1, "aggregator": "secure"}, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    silos = {"rounds": 1, "aggregator": "secure", "silos": 4, "in_silos": "apart"}
    with pytest.raises(TacitaError, match="silos add up"):
        tacita.train(**RUN, train=silos)
