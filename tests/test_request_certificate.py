"""The certificate of a request on a node: the names of its facts stay, and what is no certificate says nothing."""

from __future__ import annotations

from tacita.live.request_certificate import RequestCertificate

WAITING = {"request": "leave", "method": "tally", "taken": "nothing yet", "verified": "nothing to verify yet"}
DONE = {
    "shared items": 2,
    "request": "forget",
    "method": "fru",
    "mode": "",
    "exact": False,
    "model before": "a",
    "model after": "b",
    "clients asked": 3.0,
    "rounds": 1.0,
    "bytes up": 10.0,
    "bytes down": 20.0,
    "seconds server": 0.5,
    "taken": "what was learned out of the model",
    "effective block": 1,
    "effective after round": 4,
    "effective at": 1700000000.0,
    "verified": "by nobody",
    "purged": "request",
    "residual risk": "",
    "verdict": "taken out of the record and the model; not verified",
}


def test_facts_keep_their_names_and_their_order() -> None:
    for facts in (WAITING, DONE):
        assert list(RequestCertificate.from_facts(facts).to_facts().items()) == list(facts.items())


def test_a_certificate_is_effective_once_it_says_when() -> None:
    assert RequestCertificate.from_facts(DONE).is_effective
    assert not RequestCertificate.from_facts(WAITING).is_effective


def test_what_is_no_certificate_has_no_content() -> None:
    assert RequestCertificate.from_facts({}) == RequestCertificate()
    assert RequestCertificate.from_facts({"effective at": "yesterday"}) == RequestCertificate()
