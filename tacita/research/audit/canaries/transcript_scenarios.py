"""Which transcripts are audited: each mechanism with its neighbours, its claim, and what of it is public."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tacita.core.types import BlockStream
from tacita.models.tally.private_tally import PrivateTally
from tacita.privacy.calibration import mu_of
from tacita.research.audit.canaries import neighbours, planted_leaks
from tacita.research.audit.canaries.certificate_plays import OF_THE_MOMENT, play_certificate
from tacita.research.audit.canaries.lab_plays import (
    LabSetting,
    assemble_world,
    play_lab,
    play_own_release,
)
from tacita.research.audit.canaries.live_plays import (
    MIN_USERS,
    LivePlay,
    LiveSetting,
    play_blocks,
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
N_SEEDS = 2000

PlayNode = Callable[[bool], LivePlay]
"""Plays the world with the person on a node, or the one without them."""


# Lab


def _tally_setting(backbone: str, epsilon: float, **values: Any) -> LabSetting:
    return LabSetting({"backbone": {"name": backbone}, "privacy": {"epsilon": epsilon}, **values})


def _prepare_tally(setting: LabSetting, pair: NeighbourPair) -> PlayWorld:
    """Plays of a private tally, each read by the best reader there is."""
    stream_without = assemble_world(setting, pair.without, 0).stream
    stream_with = assemble_world(setting, pair.with_person, 0).stream
    reader = TallyReader(stream_without, stream_with)
    is_readable = stream_without.item_ids == stream_with.item_ids

    def play(with_person: bool, number: int) -> Transcript:
        world = pair.with_person if with_person else pair.without
        lab_play = play_lab(setting, world, number)
        if is_readable:
            reader.read_lab(lab_play)
        return lab_play.transcript

    return play


def _audit_tally(name: str, setting: LabSetting, pair: NeighbourPair, plays: int, leak: str = "") -> TranscriptAudit:
    epsilon = float(setting.values["privacy"]["epsilon"])
    return TranscriptAudit(
        name=name,
        neighbour=pair.name,
        against=MODEL_READER,
        epsilon=epsilon,
        prepare=lambda: _prepare_tally(setting, pair),
        plays=plays,
        public=LAB_PUBLIC,
        leak=leak,
        reader=SCORE,
        mu=mu_of(epsilon, DELTA),
    )


def list_first_blocks() -> list[TranscriptAudit]:
    """Seven worst-case neighbours of tally and tally-order."""
    audits = []
    for backbone in ("tally", "tally-order"):
        setting = _tally_setting(backbone, 4.0)
        for name, items in neighbours.list_worst_cases().items():
            pair = neighbours.make_block_pair(name, items)
            audits.append(_audit_tally(f"{backbone}, first block", setting, pair, 3000))
    return audits


def list_streams() -> list[TranscriptAudit]:
    blocks = {"kind": "blocks", "n_blocks": 4, "inner": "random"}
    setting = _tally_setting("tally", 1.0, split=blocks)
    return [_audit_tally("tally, 4 blocks", setting, neighbours.make_border_pair(), 6000)]


def _round_setting(part: dict[str, Any], rounds: int, **train: Any) -> LabSetting:
    settings = {"rounds": rounds, "aggregation": "fixed", "batch_size": 8, "patience": 1000, **train}
    return LabSetting(
        {"backbone": {"name": "mf", "dim": 32}, "method": part["name"], "parts": [part], "train": settings}
    )


def _audit_rounds(name: str, setting: LabSetting, pair: NeighbourPair, plays: int) -> TranscriptAudit:
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
    )


def list_rounds() -> list[TranscriptAudit]:
    """Rounds whose noise covers a mean: its size must not follow the number of people."""
    rounds = 10
    pair = neighbours.make_round_pair(people=100, items=250)
    sampled = {"kind": "poisson", "rate": 0.1}
    fedavg = {"name": "dp-fedavg", "epsilon": 1.0, "releases": rounds}
    dpps = {"name": "dpps", "tiers": [1.0], "shares": [1.0], "releases": rounds, "threat": "central"}
    return [
        _audit_rounds("DP-FedAvg, 10 rounds", _round_setting(fedavg, rounds, participation=sampled), pair, 600),
        _audit_rounds("DPPS central, 10 rounds", _round_setting(dpps, rounds), pair, 600),
    ]


def _audit_own_release(name: str, part: dict[str, Any], delta: float) -> TranscriptAudit:
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
        plays=3000,
        delta=delta,
    )


def list_own_releases() -> list[TranscriptAudit]:
    """What each person sends has noise of its own."""
    dpps = {"name": "dpps", "tiers": [1.0], "shares": [1.0], "releases": 1, "clip": 0.01}
    laplace = {"name": "laplace-noise", "mode": "ldp", "epsilon": 1.0, "clip": 0.01}
    return [
        _audit_own_release("DPPS local, one release", dpps, DELTA),
        _audit_own_release("Laplace noise, one release", laplace, 0.0),
    ]


def _audit_seed() -> TranscriptAudit:
    """An adversary who has the model and nothing else of the run."""
    setting = _tally_setting("tally", 1.0)
    pair = neighbours.make_round_pair(people=60, items=60)

    def play(with_person: bool, number: int) -> Transcript:
        world = pair.with_person if with_person else pair.without
        lab_play = play_lab(setting, world, number)
        add_guess(lab_play, range(N_SEEDS))
        return lab_play.transcript

    return TranscriptAudit(
        name="tally, noise of every seed taken off",
        neighbour=pair.name,
        against=MODEL_READER,
        epsilon=1.0,
        prepare=lambda: play,
        plays=0,
        public=LAB_PUBLIC,
    )


def _audit_certificate() -> TranscriptAudit:
    setting = _tally_setting("tally", 8.0)
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
    )


# Live


def _live_setting(backbone: str, epsilon: float, blocks: int = 1) -> LiveSetting:
    options: dict[str, Any] = {"name": backbone}
    if backbone == "tally-order":
        options["order_back"] = False
    values = {"backbone": options, "privacy": {"epsilon": epsilon, "blocks": blocks}}
    return LiveSetting(values, neighbours.CATALOGUE)


class LiveReader:
    """Reads plays of a node, once both worlds were played and their rows are known."""

    def __init__(self, setting: LiveSetting) -> None:
        model = build_plan(setting.config()).backbone
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


def _prepare_node(setting: LiveSetting, play_world: PlayNode) -> PlayWorld:
    reader = LiveReader(setting)
    for with_person in (False, True):
        reader.learn_rows(with_person, play_world(with_person))

    def play(with_person: bool, number: int) -> Transcript:
        return reader.read(play_world(with_person))

    return play


def _audit_node(
    name: str, neighbour: str, setting: LiveSetting, play_world: PlayNode, plays: int, leak: str = ""
) -> TranscriptAudit:
    epsilon = float(setting.values["privacy"]["epsilon"])
    return TranscriptAudit(
        name=name,
        neighbour=neighbour,
        against=SERVER,
        epsilon=epsilon,
        prepare=lambda: _prepare_node(setting, play_world),
        plays=plays,
        leak=leak,
        reader=SCORE,
        mu=mu_of(epsilon, DELTA),
    )


def _audit_node_block(backbone: str, pair: NeighbourPair, plays: int) -> TranscriptAudit:
    setting = _live_setting(backbone, 1.0)

    def play(with_person: bool) -> LivePlay:
        world = pair.with_person if with_person else pair.without
        return play_blocks(setting, [world.rows])

    return _audit_node(f"{backbone} on a node, first block", pair.name, setting, play, plays)


def _audit_newcomers() -> TranscriptAudit:
    """Everybody waits until the person has fresh rows, too."""
    setting = _live_setting("tally", 1.0)
    pair = neighbours.make_waiting_pair(MIN_USERS)

    def play(with_person: bool) -> LivePlay:
        return play_second_run(setting, pair.earlier, pair.with_person if with_person else pair.without)

    return _audit_node("tally on a node, a second run", "everybody waits", setting, play, 600)


def _audit_retractions() -> TranscriptAudit:
    """The person's item is one that nobody else who leaves has; a hostile server asks about each item."""
    setting = _live_setting("tally", 8.0, blocks=2)

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


def list_nodes() -> list[TranscriptAudit]:
    cases = neighbours.list_worst_cases()
    pairs = []
    for name in ("one common item", "all rare items", "all items"):
        pairs.append(neighbours.make_block_pair(name, cases[name]))
    threshold_pair = neighbours.make_threshold_pair(MIN_USERS)
    return [
        *(_audit_node_block("tally", pair, 600) for pair in pairs),
        _audit_node_block("tally-order", pairs[-1], 600),
        _audit_node_block("tally", threshold_pair, 600),
        _audit_newcomers(),
        _audit_retractions(),
    ]


def list_transcripts() -> list[TranscriptAudit]:
    """In the order of the table."""
    return [
        *list_first_blocks(),
        *list_streams(),
        _audit_seed(),
        _audit_certificate(),
        *list_rounds(),
        *list_own_releases(),
        *list_nodes(),
    ]
