"""The answers of both APIs, as their OpenAPI description states them; nothing more and nothing less is ever sent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tacita.live.node.request_status import RequestStatus

JsonObject = dict[str, Any]
"""What a service answers, before it is checked against one of these models."""


class ApiResponse(BaseModel):
    model_config = ConfigDict(extra="forbid")


# Of one person


class PersonSummary(ApiResponse):
    user: str
    node: str
    items: int
    taking_part: int = Field(..., alias="taking part")
    paused: bool
    mode: Literal["nothing", "some", "everything"]
    new_items: bool = Field(..., alias="new items")


class TitledItem(ApiResponse):
    item: str
    title: str


class ScoredItem(TitledItem):
    score: float


class RecommendationList(ApiResponse):
    recommendations: list[ScoredItem]


class ReasonTerm(TitledItem):
    term: float
    share: float


class Reasons(ScoredItem):
    terms: list[ReasonTerm]
    others: int
    rest: float
    kind: Literal["exact", "alike", "none"]
    explanation: str = Field(..., alias="said")


class Preview(ApiResponse):
    can: bool
    message: str = Field(..., alias="said")
    before: list[ScoredItem]
    after: list[ScoredItem]
    place_before: int | None = Field(None, alias="place before")
    place_after: int | None = Field(None, alias="place after")
    comes_in: list[ScoredItem] | None = Field(None, alias="comes in")
    goes_out: list[ScoredItem] | None = Field(None, alias="goes out")


class PaginatedResponse(ApiResponse):
    total: int
    offset: int
    limit: int


class HistoryItem(ApiResponse):
    item: str
    title: str
    time: float | None
    rating: float | None
    left_in_a_sum: bool = Field(..., alias="left in a sum")
    takes_part: bool = Field(..., alias="takes part")


class HistoryPage(PaginatedResponse):
    items: list[HistoryItem]


class ReleaseEntry(ApiResponse):
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


class ReleasePage(PaginatedResponse):
    releases: list[ReleaseEntry]


class ServerHoldings(ApiResponse):
    shown_items: list[TitledItem] = Field(..., alias="shown items")
    items_in_sums: int = Field(..., alias="items in sums")
    runs: list[str]
    left_runs: list[str] = Field(..., alias="left runs")
    statements: list[str] = Field(..., alias="said")
    server_sees: str = Field(..., alias="server sees")


class Cost(ApiResponse):
    times: int
    epsilon: float | None


class Account(ApiResponse):
    run: str
    counts: bool
    words: list[str]
    no_epsilon: str | None = None
    delta: float | None = None
    spent: float | None = None
    spent_composed: float | None = None
    budget: float | None = None
    remaining: float | None = Field(None, alias="left")
    silent: bool | None = None
    units: list[str] | None = None  # whose data what was spent is about: a person's, a silo's, or one interaction
    outside: list[str] | None = None  # what the epsilon is not about
    events: dict[str, Cost] | None = None


class Charge(ApiResponse):
    time: float
    block: int
    round: int
    sees: str
    epsilon: float | None
    spent: float | None


class Charges(PaginatedResponse):
    run: str
    costs: list[Charge]


class Budgets(ApiResponse):
    declared: float | None
    note: str = ""  # of a budget that was raised
    runs: list[Account]


class RequestStatusRow(RequestStatus):
    pass


class RequestDetails(RequestStatusRow):
    asks: str
    created: float | None
    named: list[TitledItem]


class RequestList(ApiResponse):
    requests: list[RequestDetails]
    may: list[str]


class QueuedRequests(ApiResponse):
    requests: list[RequestStatusRow]


class ErasureReceipt(ApiResponse):
    interactions: int
    users: int


class PersonRow(ApiResponse):
    user: str
    rows: int


class PeopleList(PaginatedResponse):
    people: list[PersonRow]


class PersonLink(ApiResponse):
    user: str
    link: str


# Of a server


class Health(ApiResponse):
    up: bool
    time: float
    version: str


class OverviewResponse(ApiResponse):
    address: str
    up: bool
    catalogue: int
    sees: str
    certificate_ends: float = Field(..., alias="certificate ends")


class Alert(ApiResponse):
    kind: Literal["certificate", "stopped", "quorum", "quality", "refused", "silent", "clock", "version"]
    message: str = Field(..., alias="said")


class Alerts(ApiResponse):
    alerts: list[Alert]


class RunOverview(ApiResponse):
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


class Runs(ApiResponse):
    runs: list[RunOverview]


class RoundRow(ApiResponse):
    time: float
    block: int
    round: int
    n_asked: int | None = Field(..., alias="asked")
    clients: int
    valid: float | None
    bytes_up: float | None
    bytes_down: float | None
    answered: int
    refused: int
    bad: int
    late: int
    seconds: float | None


class RoundPage(PaginatedResponse):
    run: str
    rounds: list[RoundRow]


class ReleaseSpread(ApiResponse):
    releases: int
    people_at_most: int = Field(..., alias="people at most")
    nodes: int


class SpendingBucket(ApiResponse):
    spent: str
    people_at_least: int = Field(..., alias="people at least")


class RunSpending(ApiResponse):
    run: str
    spent: list[SpendingBucket]
    spent_said: str = Field(..., alias="spent said")
    spread: list[ReleaseSpread]
    counts: bool  # whether the run counts an epsilon
    outside: list[str]  # what that epsilon is not about
    promises: dict[str, Any] | None


class NodeSummary(ApiResponse):
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


class NodePage(PaginatedResponse):
    nodes: list[NodeSummary]


class ServerRequestRow(ApiResponse):
    request: int
    run: str
    node: str
    time: float
    done: float | None
    state: str
    message: str = Field(..., alias="said")
    acknowledged: float | None = Field(..., alias="heard")
    age: float


class ServerRequestPage(PaginatedResponse):
    requests: list[ServerRequestRow]


class RunReceipt(ApiResponse):
    run: str


class OrderReceipt(RunReceipt):
    ordered: str


class NodeReceipt(ApiResponse):
    name: str


class EnrolmentReceipt(NodeReceipt):
    fingerprint: str


class PublishReceipt(ApiResponse):
    new: int
    catalogue: int
