"""Which column of a file is the user, the item, the rating and so on: as asked for, by name, or by its look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import polars as pl

from tacita.core.errors import TacitaError, unknown_name_error
from tacita.data.file_errors import file_error, list_names, quote_value
from tacita.data.values import parse_dates, parse_number

# Names that a column may go by, best first; compared without case, punctuation, ending "id" and RecBole type.
_WORDS = {
    "user": "user u uid users username customer reviewer visitor member account",
    "item": "item i iid items movie product parentasin asin sku track song artist book isbn game app anime video "
    "article news business poi location venue place",
    "rating": "rating ratings r score stars overall preference weight plays listens",
    "timestamp": "timestamp unixtimestamp unixreviewtime unixtime unix ts t time date datetime eventtime "
    "reviewtime reviewdate createdat created ratedat position",
    "title": "title movietitle itemtitle producttitle booktitle itemname artistname",
    "split": "split part",
    "block": "block",
}
_SYNONYMS = {"time": "timestamp", "part": "split"}
_ALIASES = {role: words.split() for role, words in _WORDS.items()}


def check_roles(columns: Mapping[str, str]) -> dict[str, str]:
    """The roles somebody named, each by its one name."""
    roles: dict[str, str] = {}
    for said, name in columns.items():
        role = _SYNONYMS.get(said, said)
        if role not in _ALIASES:
            raise unknown_name_error("column role", said, {*_ALIASES, *_SYNONYMS})
        if role in roles:
            raise TacitaError(f"--columns names the {role} twice, as '{roles[role]}' and as '{name}'; choose one.")
        roles[role] = name
    return roles


def rank_name(name: str, role: str) -> int | None:
    """How well a column name fits a role, 0 best, None not at all."""
    plain = _normalise_name(name)
    for one in (plain, plain.removesuffix("id")):
        if one in _ALIASES[role]:
            return _ALIASES[role].index(one)
    return None


def is_position(name: str) -> bool:
    """Whether a time column counts the places in each user's own sequence."""
    return _normalise_name(name) == "position"


def _normalise_name(name: str) -> str:
    return "".join(letter for letter in name.split(":")[0].lower() if letter.isalnum())


def number_columns(n: int) -> tuple[str, ...]:
    """The names of columns that have none."""
    return tuple(str(place) for place in range(1, n + 1))


def has_header(rows: Sequence[Sequence[str]], columns: Mapping[str, str]) -> bool:
    """Whether the first row names columns: by known or wanted names, or by having no number and no date."""
    first = [name.strip() for name in rows[0]]
    if any(rank_name(name, role) is not None for name in first for role in ("user", "item", "title")):
        return True
    wanted = set(columns.values())
    if wanted & set(first):
        return True
    if any(_guess_role([field]) for field in first):
        return False
    return not wanted & set(number_columns(len(first)))


def find_roles_by_name(path: Path, names: Sequence[str], columns: Mapping[str, str]) -> dict[str, int]:
    """The place of each role's column: as asked for, else by its name."""
    roles = _find_requested(path, names, columns)
    for role in _ALIASES:
        ranks = {at: rank_name(name, role) for at, name in enumerate(names) if at not in roles.values()}
        fitting = [(fit, at) for at, fit in ranks.items() if fit is not None and role not in columns]
        if fitting and (role != "block" or "split" in roles):  # blocks without parts are of no use
            roles[role] = min(fitting)[1]
    _refuse_twins(path, names, roles, columns)
    return _require_user_and_item(path, names, roles)


def _refuse_twins(path: Path, names: Sequence[str], roles: Mapping[str, int], columns: Mapping[str, str]) -> None:
    """Two columns of one name cannot be told apart, unless somebody said which by its number."""
    for role, at in roles.items():
        twins = [str(place) for place, name in enumerate(names, 1) if name == names[at]]
        if len(twins) > 1 and columns.get(role) not in twins:
            what = f"the header names {quote_value(names[at])} {len(twins)} times, as columns {' and '.join(twins)}"
            raise file_error(path, what, f"rename one, or say which is the {role} with --columns {role}={twins[0]}")


def find_roles_by_place(path: Path, rows: Sequence[Sequence[str]], columns: Mapping[str, str]) -> dict[str, int]:
    """Roles without a header: user, item, rating, timestamp as in MovieLens, as far as the values allow."""
    names = number_columns(len(rows[0]))
    roles = _find_requested(path, names, columns)
    for role, at in (("user", 0), ("item", 1)):
        if role not in columns and at not in roles.values():
            roles[role] = at
    for at in range(2, min(4, len(names))):
        look = _guess_role([row[at].strip() for row in rows if len(row) > at])
        look = "timestamp" if look == "rating" and at == 3 else look
        if look and look not in columns and look not in roles and at not in roles.values():
            roles[look] = at
    return _require_user_and_item(path, names, roles)


def _guess_role(values: Sequence[str]) -> str | None:
    """Rating or timestamp, by the look of the first values."""
    numbers = [number for number in map(parse_number, values) if number is not None]
    if len(numbers) * 2 > len(values):
        return "timestamp" if min(numbers) >= 1e8 else "rating"
    missing = parse_dates(pl.Series(values, dtype=pl.String)).null_count()
    return "timestamp" if missing * 2 < len(values) else None


def _find_requested(path: Path, names: Sequence[str], columns: Mapping[str, str]) -> dict[str, int]:
    """The places of the columns named by the user; '-' means none, a number counts from 1."""
    roles: dict[str, int] = {}
    for role, name in columns.items():
        if name == "-" and role not in ("user", "item"):
            continue
        at = find_column(path, role, name, names)
        if at in roles.values():
            raise file_error(path, f"column {quote_value(name)} is asked for twice", "give each role its own column")
        roles[role] = at
    return roles


def find_column(path: Path, role: str, name: str, names: Sequence[str]) -> int:
    """Where the column is that somebody named."""
    at = _find_place(name, names)
    if at is None:
        raise _missing_column_error(path, role, name, names)
    return at


def _find_place(name: str, names: Sequence[str]) -> int | None:
    """Where a column is: by its name, its name without the RecBole type, or its number."""
    for known in (list(names), [one.split(":")[0] for one in names], number_columns(len(names))):
        if name in known:
            return known.index(name)
    return None


def _missing_column_error(path: Path, role: str, name: str, names: Sequence[str]) -> TacitaError:
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {list_names(names)}"
    return file_error(path, f"no column {quote_value(name)} to be the {role}", hint)


def _require_user_and_item(path: Path, names: Sequence[str], roles: dict[str, int]) -> dict[str, int]:
    """The roles in their usual order, once there is a user and an item."""
    lacking = [role for role in ("user", "item") if role not in roles]
    if lacking:
        raise file_error(
            path,
            f"no {' and no '.join(lacking)} column found among {list_names(names)}",
            "say which they are with --columns user=...,item=... (a name, or a number from 1)",
        )
    return {role: roles[role] for role in _ALIASES if role in roles}
