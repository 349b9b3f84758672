"""Which column of a file is the user, the item, the rating and so on: by request, by name, or by its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import polars as pl

from tacita.core.errors import TacitaError, unknown_name_error
from tacita.data.file_errors import file_error, list_names, quote_value
from tacita.data.values import parse_dates, parse_number

Names = Sequence[str]
"""The names of a file's columns."""
RequestedColumns = Mapping[str, str]
"""What a caller says of the columns: role -> name or number, "-" for none."""
RolePlaces = dict[str, int]
"""Where the column of each role is, counted from 0."""

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


def normalise_roles(columns: RequestedColumns) -> dict[str, str]:
    """The requested roles, each by its one name."""
    roles: dict[str, str] = {}
    for requested, name in columns.items():
        role = _SYNONYMS.get(requested, requested)
        if role not in _ALIASES:
            raise unknown_name_error("column role", requested, {*_ALIASES, *_SYNONYMS})
        if role in roles:
            other_name = roles[role]
            raise TacitaError(f"--columns names the {role} twice, as '{other_name}' and as '{name}'; choose one.")
        roles[role] = name
    return roles


def rank_column_name(name: str, role: str) -> int | None:
    """How well a column name fits a role, 0 best, None not at all."""
    aliases = _ALIASES[role]
    plain = _normalise_name(name)
    if plain in aliases:
        return aliases.index(plain)
    base = plain.removesuffix("id")
    if base in aliases:
        return aliases.index(base)
    return None


def is_sequence_position(name: str) -> bool:
    """Whether a time column counts the places in each user's own sequence."""
    return _normalise_name(name) == "position"


def _normalise_name(name: str) -> str:
    base = name.split(":")[0].lower()
    return "".join(letter for letter in base if letter.isalnum())


def name_columns_by_number(n: int) -> tuple[str, ...]:
    """The names of columns that have none."""
    return tuple(str(place) for place in range(1, n + 1))


def has_header(rows: Sequence[Sequence[str]], columns: RequestedColumns) -> bool:
    """Whether the first row names columns: by known or wanted names, or by having no number and no date."""
    first = [name.strip() for name in rows[0]]
    for role in ("user", "item", "title"):
        ranks = [rank_column_name(name, role) for name in first]
        if any(rank is not None for rank in ranks):
            return True
    wanted = set(columns.values())
    if wanted & set(first):
        return True
    if any(_guess_role([field]) for field in first):
        return False
    numbers = name_columns_by_number(len(first))
    return not wanted & set(numbers)


def find_roles_by_name(path: Path, names: Names, columns: RequestedColumns) -> RolePlaces:
    """The place of each role's column: as requested, else by its name."""
    roles = _find_requested_columns(path, names, columns)
    for role in _ALIASES:
        if role in columns:
            continue
        if role == "block" and "split" not in roles:  # blocks without parts are of no use
            continue
        place = _find_best_name(names, role, roles)
        if place is not None:
            roles[role] = place
    _refuse_duplicate_names(path, names, roles, columns)
    return _require_user_and_item(path, names, roles)


def _find_best_name(names: Names, role: str, roles: RolePlaces) -> int | None:
    """The free column whose name fits a role best, the first of equals."""
    candidates = []
    for place, name in enumerate(names):
        if place in roles.values():
            continue
        rank = rank_column_name(name, role)
        if rank is not None:
            candidates.append((rank, place))
    if not candidates:
        return None
    _, best = min(candidates)
    return best


def _refuse_duplicate_names(path: Path, names: Names, roles: RolePlaces, columns: RequestedColumns) -> None:
    """Two columns of one name cannot be told apart, unless the caller chose one by its number."""
    for role, at in roles.items():
        name = names[at]
        twins = []
        for place, other in enumerate(names, 1):
            if other == name:
                twins.append(str(place))
        n_twins = len(twins)
        requested = columns.get(role)
        if n_twins > 1 and requested not in twins:
            first = twins[0]
            places = " and ".join(twins)
            quoted = quote_value(name)
            problem = f"the header names {quoted} {n_twins} times, as columns {places}"
            remedy = f"rename one, or say which is the {role} with --columns {role}={first}"
            raise file_error(path, problem, remedy)


def find_roles_by_place(path: Path, rows: Sequence[Sequence[str]], columns: RequestedColumns) -> RolePlaces:
    """Roles without a header: user, item, rating, timestamp as in MovieLens, as far as the values allow."""
    names = name_columns_by_number(len(rows[0]))
    roles = _find_requested_columns(path, names, columns)

    def assign(role: str, place: int) -> None:
        is_decided = role in columns or role in roles
        if not is_decided and place not in roles.values():
            roles[role] = place

    assign("user", 0)
    assign("item", 1)
    last = min(4, len(names))
    for place in range(2, last):
        long_rows = [row for row in rows if len(row) > place]
        values = [row[place].strip() for row in long_rows]
        role = _guess_role(values)
        if role == "rating" and place == 3:
            role = "timestamp"
        if role is not None:
            assign(role, place)
    return _require_user_and_item(path, names, roles)


def _guess_role(values: Sequence[str]) -> str | None:
    """Rating or timestamp, by the look of the first values."""
    n_values = len(values)
    numbers = []
    for value in values:
        number = parse_number(value)
        if number is not None:
            numbers.append(number)
    if len(numbers) * 2 > n_values:
        return "timestamp" if min(numbers) >= 1e8 else "rating"
    texts = pl.Series(values, dtype=pl.String)
    dates = parse_dates(texts)
    n_missing = dates.null_count()
    if n_missing * 2 < n_values:
        return "timestamp"
    return None


def _find_requested_columns(path: Path, names: Names, columns: RequestedColumns) -> RolePlaces:
    """The places of the columns that the caller names; '-' means none, a number counts from 1."""
    roles: RolePlaces = {}
    for role, name in columns.items():
        is_required = role in ("user", "item")
        if name == "-" and not is_required:
            continue
        place = find_column(path, role, name, names)
        if place in roles.values():
            problem = f"column {quote_value(name)} is asked for twice"
            raise file_error(path, problem, "give each role its own column")
        roles[role] = place
    return roles


def find_column(path: Path, role: str, name: str, names: Names) -> int:
    """The place of a column: by its name, its name without the RecBole type, or its number."""
    plain_names = [known.split(":")[0] for known in names]
    numbers = name_columns_by_number(len(names))
    for known_names in (names, plain_names, numbers):
        if name in known_names:
            return known_names.index(name)
    raise _missing_column_error(path, role, name, names)


def _missing_column_error(path: Path, role: str, name: str, names: Names) -> TacitaError:
    near = get_close_matches(name, names, n=1)
    if near:
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"it has {list_names(names)}"
    problem = f"no column {quote_value(name)} to be the {role}"
    return file_error(path, problem, hint)


def _require_user_and_item(path: Path, names: Names, roles: RolePlaces) -> RolePlaces:
    """The roles in their usual order, once there is a user and an item."""
    lacking = [role for role in ("user", "item") if role not in roles]
    if lacking:
        missing = " and no ".join(lacking)
        problem = f"no {missing} column found among {list_names(names)}"
        remedy = "say which they are with --columns user=...,item=... (a name, or a number from 1)"
        raise file_error(path, problem, remedy)
    return {role: roles[role] for role in _ALIASES if role in roles}
