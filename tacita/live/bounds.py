"""Whether a reply can be what so many people said: no field holds more than they could have put into it.

How many people a node has is its own word, which nobody can check; all the rest must fit that word. This keeps wrong
sums from breaking a run. It does not keep a node from bending a model within what its people could have said.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from tacita.errors import TacitaError
from tacita.live.wire import Reply, ReplyHead
from tacita.types import AnyArray, Arrays

MOST_MOVE = 1e4  # of one number of a model by one person in one round; where people do that, training has diverged
SLACK = {"train": 1.001, "statistic": 1 + 1e-9}  # sums of training travel in single precision
TILE = 1024


@dataclass(frozen=True)
class Asked:
    """The sum that was asked for."""

    rows: tuple[int, int]
    n_items: int
    heads: Arrays  # the shared parameters whose changes come with it
    extras: Arrays  # what may come beside the rows: the most that one person can add
    most_weight: float = 1.0  # of one person
    inputs: AnyArray | None = None  # the items that the rows of a statistic are about; None: all


def check_total(reply: Reply, asked: Asked) -> None:
    """Refuse a sum that does not fit the model, before anything of its size is made, or that is too large."""
    _check_shapes(reply, asked)
    head, arrays, slack = reply.head, reply.arrays, SLACK[reply.head.kind]
    if head.weight > head.clients * asked.most_weight or (asked.most_weight == 1.0 and head.weight != head.clients):
        raise _too_much("weight", head)
    if np.isfinite(asked.most_weight) and head.expected != head.clients:  # everybody takes part, nobody drops out
        raise _too_much("expected", head)
    per_row = arrays["row_weight"]
    _within("row_weight", per_row, np.array(slack * head.weight), head)
    least = 0.0
    if head.kind == "statistic":
        _check_pairs(reply, asked, per_row * slack)
    else:
        least = -np.inf
        for name in [name for name in arrays if name in ("rows", "rows/value") or name.startswith("heads/")]:
            _within(name, arrays[name], np.array(MOST_MOVE * head.weight), head, least)
    for name, most in asked.extras.items():
        if f"extras/{name}" in arrays:
            _within(f"extras/{name}", arrays[f"extras/{name}"], slack * head.weight * most, head, least)


def _check_shapes(reply: Reply, asked: Asked) -> None:
    arrays, head = reply.arrays, reply.head
    kind = np.dtype(np.float32 if head.kind == "train" else np.float64)
    wanted = {f"heads/{name}": (v.shape, kind) for name, v in asked.heads.items()}
    wanted |= {f"extras/{k}": (v.shape, kind) for k, v in asked.extras.items() if f"extras/{k}" in arrays}
    wanted["row_weight"] = ((asked.n_items,), kind)
    if "rows" in arrays:
        wanted["rows"] = (asked.rows, kind)
    else:
        at = arrays.get("rows/at", np.zeros((0, 0)))
        wanted |= {"rows/at": (at.shape, at.dtype), "rows/value": (at.shape, kind)}
        inside = tuple(head.shape) == asked.rows and at.ndim == 1 and at.dtype.kind == "i"
        if not inside or (len(at) and not 0 <= int(at.min()) <= int(at.max()) < int(np.prod(asked.rows))):
            raise TacitaError("the node's reply does not fit the model that was sent: 'rows' lie outside of it.")
    found = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise TacitaError(f"the node's reply does not fit the model that was sent: see '{name[:100]}'.")


def _check_pairs(reply: Reply, asked: Asked, people: AnyArray) -> None:
    """A pair of items is with at most as many people as either of them."""
    arrays, head = reply.arrays, reply.head
    first = people if asked.inputs is None else people[asked.inputs]
    if "rows/at" in arrays:
        row, col = np.divmod(arrays["rows/at"], asked.rows[1])
        _within("rows/value", arrays["rows/value"], np.minimum(first[row], people[col]), head)
    for name, square in arrays.items():
        if square.shape != asked.rows:
            continue
        for lo in range(0, len(square), TILE):
            most = np.minimum(first[lo : lo + TILE, None], people[None, :])
            _within(name, square[lo : lo + TILE], most, head)


def check_survey(reply: Reply, n_items: int) -> None:
    counts = reply.arrays.get("counts", np.zeros(0))
    if reply.arrays.keys() != {"counts"} or counts.shape != (n_items,) or counts.dtype.kind != "i":
        raise TacitaError("the node's reply holds no 'counts' for every item.")
    _within("counts", counts, np.array(reply.head.clients), reply.head)


def check_sums(reply: Reply, names: Collection[str]) -> None:
    """Refuse scores that nobody can have."""
    head = reply.head
    if reply.arrays:
        raise TacitaError(f"the node's reply holds '{next(iter(reply.arrays))[:100]}', which was not asked for.")
    for name, (total, n) in head.sums.items():
        if name not in names:
            raise TacitaError(f"the node's reply holds a score '{name[:100]}', which was not asked for.")
        if not 0 <= n <= head.clients or not 0 <= total <= n * (1 + 1e-9):
            raise _too_much(f"sums/{name}", head)


def _within(name: str, value: AnyArray, most: AnyArray, head: ReplyHead, least: float = 0.0) -> None:
    """Refuse what is above `most`, below `least`, or in size above `most` where there is no least."""
    size = np.abs(value) if least < 0 else value
    if not ((size >= max(least, 0.0)) & (size <= most)).all():
        raise _too_much(name, head)


def _too_much(name: str, head: ReplyHead) -> TacitaError:
    people = "1 person" if head.clients == 1 else f"{head.clients:,} people"
    return TacitaError(
        f"the node's reply holds in '{name}' what {people} cannot have said; the node is wrong, or training diverged."
    )
