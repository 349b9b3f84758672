"""What the calls of both APIs answer, as their description tells it: nothing more, and nothing less, is ever sent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


# Of one person


class Me(Answer):
    user: str
    node: str
    items: int
    taking_part: int = Field(..., alias="taking part")
    paused: bool
    mode: Literal["nothing", "some", "everything"]
    new_items: bool = Field(..., alias="new items")


class Named(Answer):
    item: str
    title: str


class Scored(Named):
    score: float


class Recommended(Answer):
    recommendations: list[Scored]


class Term(Named):
    term: float
    share: float


class Reasons(Scored):
    terms: list[Term]
    others: int
    rest: float
    kind: Literal["exact", "alike", "none"]
    said: str


class Preview(Answer):
    can: bool
    said: str
    before: list[Scored]
    after: list[Scored]
    place_before: int | None = Field(None, alias="place before")
    place_after: int | None = Field(None, alias="place after")
    comes_in: list[Scored] | None = Field(None, alias="comes in")
    goes_out: list[Scored] | None = Field(None, alias="goes out")


class Paged(Answer):
    total: int
    offset: int
    limit: int


class Owned(Answer):
    item: str
    title: str
    time: float | None
    rating: float | None
    left_in_a_sum: bool = Field(..., alias="left in a sum")
    takes_part: bool = Field(..., alias="takes part")


class History(Paged):
    items: list[Owned]


class Left(Answer):
    time: float
    run: str
    block: int
    round: int
    kind: str
    people: int
    bytes: int
    sees: str
    epsilon: str
    yours: bool
    cost: float | None
    spent: float | None
    cost_said: str = Field(..., alias="cost said")


class Releases(Paged):
    releases: list[Left]


class HeldThere(Answer):
    shown_items: list[Named] = Field(..., alias="shown items")
    items_in_sums: int = Field(..., alias="items in sums")
    runs: list[str]
    left_runs: list[str] = Field(..., alias="left runs")
    said: list[str]
    server_sees: str = Field(..., alias="server sees")


class Cost(Answer):
    times: int
    epsilon: float | None


class Account(Answer):
    run: str
    counts: bool
    words: list[str]
    no_epsilon: str | None = None
    delta: float | None = None
    spent: float | None = None
    spent_composed: float | None = None
    budget: float | None = None
    left: float | None = None
    silent: bool | None = None
    units: list[str] | None = None  # whose data what was spent is about: a person's, a silo's, or one interaction
    events: dict[str, Cost] | None = None


class Charge(Answer):
    time: float
    block: int
    round: int
    sees: str
    epsilon: float | None
    spent: float | None


class Charges(Paged):
    run: str
    costs: list[Charge]


class Budgets(Answer):
    declared: float | None
    runs: list[Account]


class Standing(Answer):
    request: int
    user: str | None
    kind: str
    items: int
    run: str
    state: str
    age: float | None
    done: bool
    effect: str
    certificate: dict[str, Any]


class Asked(Standing):
    asks: str
    created: float | None
    named: list[Named]


class Requests(Answer):
    requests: list[Asked]
    may: list[str]


class Queued(Answer):
    requests: list[Standing]


class Erased(Answer):
    interactions: int
    users: int


class Somebody(Answer):
    user: str
    rows: int


class People(Paged):
    people: list[Somebody]


class Link(Answer):
    user: str
    link: str


# Of a server


class Health(Answer):
    up: bool
    time: float
    version: str


class Overview(Answer):
    address: str
    up: bool
    catalogue: int
    sees: str
    certificate_ends: float = Field(..., alias="certificate ends")


class Alert(Answer):
    kind: Literal["certificate", "stopped", "quorum", "quality", "refused", "silent", "clock", "version"]
    said: str


class Alerts(Answer):
    alerts: list[Alert]


class Run(Answer):
    run: str
    standing: str
    stopped: str | None
    under_way: bool = Field(..., alias="under way")
    blocks_done: int = Field(..., alias="blocks done")
    blocks_opened: int = Field(..., alias="blocks opened")
    round: int
    rounds: int
    backbone: str
    method: str
    quality: list[dict[str, float]]
    controls: list[dict[str, dict[str, float]]]
    below_most_popular: str = Field(..., alias="below most popular")
    controls_said: str = Field(..., alias="controls said")


class Runs(Answer):
    runs: list[Run]


class Round(Answer):
    time: float
    block: int
    round: int
    asked: int | None
    clients: int
    valid: float | None
    bytes_up: float | None
    bytes_down: float | None
    answered: int
    refused: int
    bad: int
    late: int
    seconds: float | None


class Rounds(Paged):
    run: str
    rounds: list[Round]


class Spread(Answer):
    releases: int
    people_at_most: int = Field(..., alias="people at most")
    nodes: int


class Spent(Answer):
    spent: str
    people_at_least: int = Field(..., alias="people at least")


class Spreads(Answer):
    run: str
    spent: list[Spent]
    spent_said: str = Field(..., alias="spent said")
    spread: list[Spread]
    counts: bool  # whether the run counts an epsilon
    promises: dict[str, Any] | None


class Node(Answer):
    name: str
    state: str
    enrolled: float
    last_answer: float | None = Field(..., alias="last answer")
    last_seen: float | None = Field(..., alias="last seen")
    version: str
    clock: float | None
    last_error: str = Field(..., alias="last error")
    error_time: float | None = Field(..., alias="error time")
    fingerprint: str


class Nodes(Paged):
    nodes: list[Node]


class AskedThere(Answer):
    request: int
    run: str
    node: str
    time: float
    done: float | None
    state: str
    said: str
    heard: float | None
    age: float


class RequestsThere(Paged):
    requests: list[AskedThere]


class Begun(Answer):
    run: str


class Ordered(Begun):
    ordered: str


class Revoked(Answer):
    name: str


class Enrolled(Revoked):
    fingerprint: str


class Published(Answer):
    new: int
    catalogue: int
