"""DPPS on whole numbers: the discrete Gaussian on sums that are exact, and a clip that leaves room for rounding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from helpers import noise_laws
from helpers.noise_laws import SURE
from helpers.oracle import started
from helpers.private_federation import ROUND, crowd_stream, dpps_part, federate_parts, serving_broadcast
from tacita.core.errors import TacitaError
from tacita.messages import QUANTUM, SparseRows, Spec, Total, Upload, add_upload, empty_total
from tacita.methods.personal.dp_fedavg import DPFedAvg
from tacita.methods.personal.dpps import DPPS
from tacita.methods.personal.releases import bound_rounding_error, clip_upload, compute_l1_norms
from tacita.privacy.ledger import UNIT
from tacita.round.plan import Federation

WHOLE: dict[str, Any] = {"name": "dpps", "noise_on": "wholes", "tiers": [1.0], "shares": [1.0], "between": 0.0}
EXACT: dict[str, Any] = {"aggregator": "ideal"}


def told(fed: Federation) -> Total:
    progress = started(fed)
    return progress.devices.exchange(fed, progress.server, serving_broadcast(fed, progress), ROUND).total


def wholes(value: np.ndarray) -> np.ndarray:
    result = value / QUANTUM
    assert np.array_equal(result, np.rint(result)), "something was rounded after the noise"
    return result.astype(np.int64)


def test_sums_and_noise_are_integers_of_the_same_law() -> None:
    stream = crowd_stream(4, 3000)
    fed = federate_parts({**WHOLE, "clip": 0.5}, stream=stream, **EXACT)
    total = told(fed)
    sigma = 2 * dpps_part(fed).compute_noise_deviations()[0]  # of four people
    plain = told(federate_parts(stream=stream, **EXACT))
    untouched = np.abs(plain["rows"]).sum(axis=1) == 0
    noise = wholes(total["rows"])[untouched] * QUANTUM
    assert noise_laws.normal(noise, sigma) > SURE
    assert noise_laws.normal(noise, 0.95 * sigma) < SURE
    for name, value in total.sums.items():
        if not name.startswith("dpps.noise"):
            wholes(value)


def test_the_law_is_the_discrete_one_where_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a quantum as wide as the noise, single numbers have the probabilities of the discrete Gaussian."""
    from tacita.core.draws import Draws
    from tacita.methods.personal.releases import add_integer_noise
    from tacita.privacy.noise import NoiseStream

    total = Total({"rows": np.zeros((200, 100))}, 1.0, 1, {}, 0)
    rows = add_integer_noise(total, 1.5, NoiseStream(Draws(3), "x"), ("no",), 1.0)["rows"].astype(np.int64)
    assert noise_laws.whole_normal(rows, 1.5) > SURE
    assert noise_laws.whole_normal(rows, 1.4) < SURE
    for symmetric in ({"gram": 1}, {}):  # by what a sum is, not by what is in it
        total = Total({"gram": np.eye(40)}, 1.0, 1, {}, 0, symmetric)
        square = add_integer_noise(total, 1.5, NoiseStream(Draws(3), "y"), ("no",), 1.0)["gram"]
        assert np.array_equal(square, square.T) == bool(symmetric)


@pytest.mark.parametrize("noise_on", ["reals", "wholes"])
@pytest.mark.parametrize("clip", [0.01, 1.0])
def test_rounding_keeps_uploads_within_the_clip(clip: float, noise_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DPPS, "noise_sum", lambda part, server, total: total)
    for tiers in ([1.0], [0.5, 5.0]):
        part = {**WHOLE, "noise_on": noise_on, "clip": clip, "tiers": tiers, "shares": [1.0] * len(tiers)}
        fed = federate_parts(part, stream=crowd_stream(1, 40), **EXACT)
        total = told(fed)
        length = math.sqrt(sum(float((v**2).sum()) for k, v in total.sums.items() if k != "dpps.noise"))
        room = float(dpps_part(fed)._bound_rounding_error(40, total.weight)) / clip
        assert 0 < room < 0.01
        assert length / total.weight <= clip
        if clip < 0.1:  # it binds
            assert length / total.weight > clip * (1 - 3 * room)


def test_rounding_keeps_dp_fedavg_uploads_within_the_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DPFedAvg, "noise_sum", lambda part, server, total: total)
    clip, fixed = 0.001, {"aggregation": "fixed", "participation": {"kind": "all"}}
    part = {"name": "dp-fedavg", "noise": 1.0, "clip": clip}
    lengths, room = (
        [],
        bound_rounding_error(federate_parts(part, stream=crowd_stream(1, 40), **EXACT, **fixed).parts[0].context, 40),
    )
    for more in (EXACT, {}):
        total = told(federate_parts(part, stream=crowd_stream(1, 40), **more, **fixed))
        lengths.append(math.sqrt(sum(float((v**2).sum()) for v in total.sums.values())))
    assert 0 < room < clip / 10
    assert clip - 3 * room < lengths[0] <= clip - room / 2  # rounding adds half of what it may at most
    assert lengths[1] > clip * (1 - 1e-5)
    with pytest.raises(TacitaError, match=r"larger dp-fedavg\.clip"):
        federate_parts({**part, "clip": 1e-5}, **EXACT, **fixed)


def test_discrete_noise_costs_as_continuous_noise() -> None:
    spent = []
    for kind in ("reals", "wholes"):
        fed = federate_parts({**WHOLE, "noise_on": kind, "releases": 4}, **EXACT)
        progress = started(fed)
        progress.devices.exchange(fed, progress.server, serving_broadcast(fed, progress), ROUND)
        spent.append(progress.clients.parts["dpps"]["spent"])
        assert dpps_part(fed).compute_noise_deviations()[0] > 0
    assert np.array_equal(*spent)
    assert spent[0][0, 0] * UNIT > 0


def test_discrete_noise_is_refused_for_inexact_sums() -> None:
    with pytest.raises(TacitaError, match=r"train\.aggregator = 'ideal'"):
        federate_parts(WHOLE)
    with pytest.raises(TacitaError, match=r"more than a tenth of the clip"):
        federate_parts({**WHOLE, "clip": 1e-5}, **EXACT)
    with pytest.raises(TacitaError, match=r"more than a tenth of the clip"):
        federate_parts({**WHOLE, "noise_on": "reals", "clip": 1e-5}, **EXACT)


def test_counted_laplace_noise_refuses_rounded_sums() -> None:
    """64,000 numbers of half a quantum and a little more: shortened to 0.0019, as they would leave twice as long."""
    vectors = np.full((4000, 16), np.nextafter(np.float32(QUANTUM / 2), np.float32(1)))
    owner, items = np.zeros(4000, np.int32), np.arange(4000, dtype=np.int32)
    upload = Upload({"rows": SparseRows(owner, items, vectors)}, np.ones(1), np.zeros(1, np.uint64))
    length = float(compute_l1_norms(upload)[0])
    fields = (Spec("rows", (4000, 16)),)
    rounded = add_upload(empty_total(fields), clip_upload(upload, length, compute_l1_norms(upload)), fields, exact=True)
    assert np.abs(rounded["rows"]).sum() > 1.99 * length
    part = {"name": "laplace-noise", "mode": "ldp", "clip": length}
    for how in ("ideal", "secure"):
        with pytest.raises(TacitaError, match="longer then than what is counted"):
            federate_parts(part, aggregation="mean", aggregator=how)
    federate_parts(part, aggregation="mean")
