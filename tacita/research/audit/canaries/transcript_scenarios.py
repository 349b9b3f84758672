"""Which transcripts are audited: each mechanism with its neighbours, its claim, and what of it is public."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tacita.core.types import BlockStream
from tacita.models.tally.private_tally import PrivateTally
from tacita.privacy.calibration import compute_max_mu
from tacita.research.audit.canaries import neighbours, planted_leaks
from tacita.research.audit.canaries.certificate_plays import OF_THE_MOMENT, play_certificate
from tacita.research.audit.canaries.lab_plays import (
    SEEDS,
    SMALL_EVALUATION,
    LabSetting,
    assemble_world,
    play_lab,
    play_own_release,
)
from tacita.research.audit.canaries.live_plays import (
    MIN_USERS,
    LivePlay,
    LiveSetting,
    play_block,
    play_retractions,
    play_second_run,
)
from tacita.research.audit.canaries.neighbours import NeighbourPair
from tacita.research.audit.canaries.noise_guessing import add_guess
from tacita.research.audit.canaries.tally_reader import SCORE, TallyReader
from tacita.research.audit.canaries.transcript_audit import DELTA, PlayWorld, TranscriptAudit
from tacita.research.audit.canaries.transcripts import Transcript
from tacita.runs.assembly import build_plan

MODEL_READER = "who gets the models"
SERVER = "the server"
LAB_PUBLIC = {"fingerprint": "a digest of the data, printed as outside of the budget"}
N_PROBES = 6
MANY_USERS = 40  # that a node needs where they wait for each other
ROUNDS = 10
ROUND_ITEMS = 250
SERVED_ROUNDS = 6
SERVED_ROUND = "which round is the best is chosen on private validation items, which no ledger counts"

PlayNode = Callable[[bool], LivePlay]
"""Plays the world with the person on a node, or the one without them."""


# Lab


def _make_tally_setting(backbone: str, epsilon: float, **values: Any) -> LabSetting:
    return LabSetting({"backbone": {"name": backbone}, "privacy": {"epsilon": epsilon}, **values})


def _make_tally_play(setting: LabSetting, pair: NeighbourPair) -> PlayWorld:
    """Plays of a private tally, each read by the best reader there is."""
    stream_without = assemble_world(setting, pair.without, 0).stream
    stream_with = assemble_world(setting, pair.with_person, 0).stream
    reader = TallyReader(stream_without, stream_with)
    is_readable = stream_without.item_ids == stream_with.item_ids

    def play(with_person: bool, number: int) -> Transcript:
        world = pair.with_person if with_person else pair.without
        lab_play = play_lab(setting, world, number)
        if is_readable:
            reader.score_lab_play(lab_play)
        return lab_play.transcript

    return play


def _make_tally_audit(
    name: str, setting: LabSetting, pair: NeighbourPair, plays: int, leak: str = ""
) -> TranscriptAudit:
    epsilon = float(setting.values["privacy"]["epsilon"])
    return TranscriptAudit(
        name=name,
        neighbour=pair.name,
        against=MODEL_READER,
        epsilon=epsilon,
        prepare=lambda: _make_tally_play(setting, pair),
        plays=plays,
        public=LAB_PUBLIC,
        leak=leak,
        reader=SCORE,
        mu=compute_max_mu(epsilon, DELTA),
    )


def list_first_block_audits() -> list[TranscriptAudit]:
    """Seven worst-case neighbours of tally and tally-order."""
    audits = []
    for backbone in ("tally", "tally-order"):
        setting = _make_tally_setting(backbone, 4.0)
        for name, items in neighbours.list_worst_cases().items():
            pair = neighbours.make_block_pair(name, items)
            leak = planted_leaks.CATALOGUE_OF_DATA if name == "all rare items" else ""
            audits.append(_make_tally_audit(f"{backbone}, first block", setting, pair, 600, leak))
    return audits


def list_stream_audits() -> list[TranscriptAudit]:
    blocks = {"kind": "blocks", "n_blocks": 4, "inner": "random"}
    setting = _make_tally_setting("tally", 1.0, split=blocks)
    pair = neighbours.make_border_pair(people=200, repeats=120)
    audit = _make_tally_audit("tally, 4 blocks", setting, pair, 1200, planted_leaks.QUANTILE_BORDERS)
    return [replace(audit, leak_plays=120)]


def _make_round_setting(part: dict[str, Any], **train: Any) -> LabSetting:
    settings = {"rounds": ROUNDS, "aggregation": "fixed", "batch_size": 8, "patience": 1000, **train}
    backbone = {"name": "mf", "dim": 32}
    values = {"backbone": backbone, "method": part["name"], "parts": [part], "train": settings}
    return LabSetting(values, neighbours.name_items(ROUND_ITEMS))


def _make_round_audit(name: str, setting: LabSetting, pair: NeighbourPair, plays: int) -> TranscriptAudit:
    def play(with_person: bool, number: int) -> Transcript:
        world = pair.with_person if with_person else pair.without
        return play_lab(setting, world, number).transcript

    return TranscriptAudit(
        name=name,
        neighbour=pair.name,
        against=MODEL_READER,
        epsilon=1.0,
        prepare=lambda: play,
        plays=plays,
        public=LAB_PUBLIC,
        leak=planted_leaks.COUNTED_DENOMINATOR,
        leak_plays=120,
    )


def list_round_audits() -> list[TranscriptAudit]:
    """Rounds whose noise covers a mean: its size must not follow the number of people."""
    people = 100
    rate = 0.1
    pair = neighbours.make_round_pair(people, ROUND_ITEMS)
    sampled = {"kind": "poisson", "rate": rate}
    fedavg = {"name": "dp-fedavg", "epsilon": 1.0, "releases": ROUNDS}
    dpps = {"name": "dpps", "tiers": [1.0], "shares": [1.0], "releases": ROUNDS, "threat": "central"}
    fedavg_setting = _make_round_setting(fedavg, participation=sampled, denominator=rate * people)
    dpps_setting = _make_round_setting(dpps, denominator=float(people))
    return [
        _make_round_audit(f"DP-FedAvg, {ROUNDS} rounds", fedavg_setting, pair, 240),
        _make_round_audit(f"DPPS central, {ROUNDS} rounds", dpps_setting, pair, 240),
        _make_served_round_audit(),
    ]


def _make_served_round_audit() -> TranscriptAudit:
    """Which round is served is chosen on validation items, which no ledger counts."""
    part = {"name": "dp-fedavg", "epsilon": 1.0, "releases": SERVED_ROUNDS}
    values: dict[str, Any] = {
        "backbone": {"name": "mf", "dim": 4},
        "method": part["name"],
        "parts": [part],
        "train": {
            "rounds": SERVED_ROUNDS,
            "aggregation": "fixed",
            "batch_size": 8,
            "denominator": float(neighbours.N_OTHERS),
            "participation": {"kind": "all"},
        },
        "split": {"kind": "random"},
        "evaluate": {**SMALL_EVALUATION, "every": 1},
    }
    pair = neighbours.make_validation_pair()
    audit = _make_round_audit("DP-FedAvg, the round that is served", LabSetting(values), pair, 240)
    return replace(audit, leak="", uncovered=SERVED_ROUND)


def _make_own_release_audit(name: str, part: dict[str, Any], delta: float) -> TranscriptAudit:
    setting = LabSetting({"backbone": {"name": "mf", "dim": 2}, "method": "fedavg", "parts": [part]})
    pair = neighbours.make_replaced_pair()

    def play(with_person: bool, number: int) -> Transcript:
        world = pair.with_person if with_person else pair.without
        return play_own_release(setting, world, number)

    return TranscriptAudit(
        name=name,
        neighbour=pair.name,
        against=SERVER,
        epsilon=1.0,
        prepare=lambda: play,
        plays=600,
        delta=delta,
    )


def list_own_release_audits() -> list[TranscriptAudit]:
    """What each person sends has noise of its own."""
    dpps = {"name": "dpps", "tiers": [1.0], "shares": [1.0], "releases": 1, "clip": 0.01}
    laplace = {"name": "laplace-noise", "mode": "ldp", "epsilon": 1.0, "clip": 0.01}
    return [
        _make_own_release_audit("DPPS local, one release", dpps, DELTA),
        _make_own_release_audit("Laplace noise, one release", laplace, 0.0),
    ]


def _make_seed_audit() -> TranscriptAudit:
    """An adversary who has the model and nothing else of the run."""
    n_items = 60
    values = {"backbone": {"name": "tally"}, "privacy": {"epsilon": 1.0}}
    setting = LabSetting(values, neighbours.name_items(n_items))
    pair = neighbours.make_round_pair(people=60, items=n_items)

    def play(with_person: bool, number: int) -> Transcript:
        world = pair.with_person if with_person else pair.without
        lab_play = play_lab(setting, world, number)
        add_guess(lab_play, range(SEEDS))
        return lab_play.transcript

    return TranscriptAudit(
        name="tally, noise of every seed taken off",
        neighbour=pair.name,
        against=MODEL_READER,
        epsilon=1.0,
        prepare=lambda: play,
        plays=0,
        exact_plays=3,
        public=LAB_PUBLIC,
        leak=planted_leaks.NOISE_OF_SEED,
    )


def _make_certificate_audit() -> TranscriptAudit:
    setting = _make_tally_setting("tally", 8.0)
    pair = neighbours.make_block_pair("all common items", neighbours.COMMON_ITEMS)

    def play(with_person: bool, number: int) -> Transcript:
        world = pair.with_person if with_person else pair.without
        return play_certificate(setting, world, number)

    return TranscriptAudit(
        name="tally, certificate of another person",
        neighbour=pair.name,
        against="who reads the certificate",
        epsilon=8.0,
        prepare=lambda: play,
        plays=0,
        public=OF_THE_MOMENT,
        leak=planted_leaks.FULL_CERTIFICATE,
    )


# Live


def _make_live_setting(backbone: str, epsilon: float, blocks: int = 1) -> LiveSetting:
    options: dict[str, Any] = {"name": backbone}
    if backbone == "tally-order":
        options["order_back"] = False
    values = {"backbone": options, "privacy": {"epsilon": epsilon, "blocks": blocks}}
    return LiveSetting(values, neighbours.CATALOGUE)


class LiveReader:
    """Reads plays of a node, once both worlds were played and their rows are known."""

    def __init__(self, setting: LiveSetting) -> None:
        model = build_plan(setting.build_config()).backbone
        assert isinstance(model, PrivateTally)
        self.model = model
        self.streams: dict[bool, BlockStream] = {}

    def learn_rows(self, with_person: bool, play: LivePlay) -> None:
        if play.stream is not None:
            self.streams[with_person] = play.stream

    def read(self, play: LivePlay) -> Transcript:
        if len(self.streams) == 2:
            reader = TallyReader(self.streams[False], self.streams[True])
            reader.read(self.model, play.releases, play.transcript)
        return play.transcript


def _make_node_play(setting: LiveSetting, play_world: PlayNode) -> PlayWorld:
    reader = LiveReader(setting)
    for with_person in (False, True):
        reader.learn_rows(with_person, play_world(with_person))

    def play(with_person: bool, number: int) -> Transcript:
        return reader.read(play_world(with_person))

    return play


def _make_node_audit(
    name: str, neighbour: str, setting: LiveSetting, play_world: PlayNode, plays: int, leak: str = ""
) -> TranscriptAudit:
    epsilon = float(setting.values["privacy"]["epsilon"])
    return TranscriptAudit(
        name=name,
        neighbour=neighbour,
        against=SERVER,
        epsilon=epsilon,
        prepare=lambda: _make_node_play(setting, play_world),
        plays=plays,
        leak=leak,
        reader=SCORE,
        mu=compute_max_mu(epsilon, DELTA),
    )


def _make_node_block_audit(backbone: str, pair: NeighbourPair, plays: int) -> TranscriptAudit:
    setting = _make_live_setting(backbone, 1.0)

    def play(with_person: bool) -> LivePlay:
        world = pair.with_person if with_person else pair.without
        return play_block(setting, world.rows)

    return _make_node_audit(f"{backbone} on a node, first block", pair.name, setting, play, plays)


def _make_threshold_audit() -> TranscriptAudit:
    """With the person as many people as one sum needs have data; without their data one fewer."""
    setting = _make_live_setting("tally", 1.0)
    pair = neighbours.make_threshold_pair(MIN_USERS)

    def play(with_person: bool) -> LivePlay:
        silent = () if with_person else (neighbours.PERSON,)
        return play_block(setting, pair.with_person.rows, silent)

    return _make_node_audit("tally on a node, first block", pair.name, setting, play, 240, planted_leaks.EXACT_COUNTS)


def _make_newcomers_audit() -> TranscriptAudit:
    """Everybody waits until the person has fresh rows, too."""
    setting = replace(_make_live_setting("tally", 1.0), min_users=MANY_USERS)
    pair = neighbours.make_waiting_pair(MANY_USERS)

    def play(with_person: bool) -> LivePlay:
        return play_second_run(setting, pair.earlier, pair.with_person if with_person else pair.without)

    name = "tally on a node, a second run"
    return _make_node_audit(name, "everybody waits", setting, play, 240, planted_leaks.WAITING_NEWCOMERS)


def _make_retractions_audit() -> TranscriptAudit:
    """The person's item is one that nobody else who leaves has; a hostile server asks about each item."""
    setting = _make_live_setting("tally", 8.0, blocks=2)

    def play(with_person: bool, number: int) -> Transcript:
        world = neighbours.make_leaving_world(MIN_USERS, with_person)
        return play_retractions(setting, world, N_PROBES)

    return TranscriptAudit(
        name="tally on a node, repeated retractions",
        neighbour="another item",
        against=SERVER,
        epsilon=8.0,
        prepare=lambda: play,
        plays=0,
        exact_plays=3,
        leak=planted_leaks.EXACT_REPLAY,
    )


def list_node_audits() -> list[TranscriptAudit]:
    cases = neighbours.list_worst_cases()
    pairs = []
    for name in ("one common item", "all rare items", "all items"):
        pairs.append(neighbours.make_block_pair(name, cases[name]))
    return [
        *(_make_node_block_audit("tally", pair, 240) for pair in pairs),
        _make_node_block_audit("tally-order", pairs[-1], 240),
        _make_threshold_audit(),
        _make_newcomers_audit(),
        _make_retractions_audit(),
    ]


def list_transcript_audits() -> list[TranscriptAudit]:
    """In the order of the table."""
    return [
        *list_first_block_audits(),
        *list_stream_audits(),
        _make_seed_audit(),
        _make_certificate_audit(),
        *list_round_audits(),
        *list_own_release_audits(),
        *list_node_audits(),
    ]
