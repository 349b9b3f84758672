"""What calls and answers look like, for the description of the API and to refuse calls that do not fit it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from tacita.web.answers import ListOptions
from tacita.web.limits import MOST_ITEMS, MOST_K, MOST_LETTERS, MOST_USERS

LARGEST = 2**63 - 1
TextId = Annotated[str, Field(min_length=1, max_length=MOST_LETTERS)]
NumberId = Annotated[int, Field(ge=-LARGEST, le=LARGEST, strict=True)]
RawId = TextId | NumberId
"""An id as the data has it; whole numbers may be written as such."""


def to_text(raw_id: str | int) -> str:
    return str(raw_id).strip()


class CallBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ListBody(CallBody):
    """What the lists may hold."""

    k: int = Field(10, ge=1, le=MOST_K, description="Items of each list.")
    include_seen: bool = Field(False, alias="seen", description="Also items that a person has.")
    exclude: list[RawId] = Field([], max_length=MOST_ITEMS, description="Items that nobody gets.")
    include: list[RawId] | None = Field(
        None, min_length=1, max_length=MOST_ITEMS, description="The only items that anybody gets."
    )

    def to_options(self) -> ListOptions:
        exclude = tuple(to_text(item) for item in self.exclude)
        include = None if self.include is None else tuple(to_text(item) for item in self.include)
        return ListOptions(self.k, self.include_seen, exclude, include)


class BatchBody(ListBody):
    users: list[RawId] = Field(min_length=1, max_length=MOST_USERS, description="People of the run.")


class HistoryBody(ListBody):
    history: list[RawId] = Field(
        min_length=1, max_length=MOST_ITEMS, description="Items that the person chose, oldest first."
    )


class AnswerModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CallProblem(AnswerModel):
    """Why a call was not followed, in one sentence."""

    error: str


class Liveness(AnswerModel):
    up: bool
    version: str


class RunDescription(AnswerModel):
    data: str
    method: str
    backbone: str
    block: int
    users: int
    items: int
    privacy: str = Field(description="What the run promises.")


class Reason(AnswerModel):
    item: str
    effect: float | None
    title: str | None


class ReasonList(AnswerModel):
    basis: str = Field(description='"left out": what the score loses without the item; "alike": likeness alone.')
    items: list[Reason]


class RecommendedItem(AnswerModel):
    rank: int
    item: str
    score: float | None = Field(description="It orders one person's items, and says nothing across people.")
    title: str | None
    why: ReasonList | None = None


class PersonList(AnswerModel):
    user: str
    basis: str = Field(
        description='"history"; for a person of whom nothing is known "popularity", or "catalogue" (its first items).'
    )
    items: list[RecommendedItem]


class BatchLists(AnswerModel):
    recommendations: list[PersonList]
    unknown: list[str] = Field(description="People who are not in the run.")


class NewcomerList(AnswerModel):
    items: list[RecommendedItem]
    ignored: list[str] = Field(description="Items of the history that the run does not know.")


class SimilarItems(AnswerModel):
    item: str
    title: str | None
    items: list[RecommendedItem]


class ItemExplanation(AnswerModel):
    user: str
    item: str
    title: str | None
    score: float | None
    basis: str
    items: list[Reason]
