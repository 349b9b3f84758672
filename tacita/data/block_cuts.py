"""Where time blocks begin: by quantiles of all rows, by public dates, or by each person's own rows.

Quantiles of all rows move with everybody's rows: one person moves rows of others to another block. Where a run states
an epsilon, a row's block may depend on its own person alone, so borders are dates or each person's own counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from fractions import Fraction

import numpy as np

from tacita.core.config import SplitConfig
from tacita.core.errors import TacitaError
from tacita.core.types import Ints, Longs
from tacita.data.interaction_table import SECONDS_PER_UNIT, Interactions, guess_time_unit, select_rows
from tacita.data.split_roles import rank_in_user

PER_PERSON_NOTE = (
    "blocks: every person's own rows are cut into the blocks, because borders by everybody's rows would let one person "
    "move others' rows under a budget; split.borders = ['2020-01-01', ...] cuts by public dates."
)


def cuts_by_row_quantiles(config: SplitConfig) -> bool:
    """Whether borders are quantiles of everybody's rows."""
    return config.kind == "blocks" and config.borders in ("auto", "quantile")


def refuse_split_across_people(config: SplitConfig) -> None:
    """Refuse what lets one person's rows decide on another person's, under a budget."""
    if config.k_core is not None and config.k_core > 1:
        raise TacitaError(
            f"split.k_core = {config.k_core} lets one person decide which rows of others stay, which no epsilon "
            "counts; leave it out, or use split.min_user, which counts a person's own rows."
        )
    if config.kind == "global-random":
        raise TacitaError(
            "split.kind = 'global-random' lets one person's rows move those of others between training and test, "
            "which no epsilon counts; use 'random', which splits every person by themselves."
        )
    if config.kind in ("auto", "blocks") and config.borders == "quantile":
        raise TacitaError(
            "split.borders = 'quantile' lets one person's rows move those of others to another block, which no "
            "epsilon counts; use 'person', or public dates such as ['2020-01-01']."
        )


def isolate_people_in_split(resolved: SplitConfig) -> SplitConfig:
    """The split of a run that states an epsilon: nobody's rows are filtered or cut by those of others."""
    changes: dict[str, object] = {"k_core": 0}
    has_time_blocks = resolved.kind == "blocks" and resolved.n_blocks > 1
    has_source_roles = resolved.kind == "given"
    if has_source_roles or (has_time_blocks and resolved.borders == "auto"):
        changes["borders"] = "person"
    return resolved.model_copy(update=changes)


def limit_source_blocks(table: Interactions, split_config: SplitConfig, n_planned: int) -> tuple[Interactions, int]:
    """The rows of a file that names its own blocks, and how many blocks there are: a public number.

    Rows of later blocks are left out, and blocks without rows are there all the same: else one row in a block of its
    own would show in how many models there are, and plan the noise of all. 1: the file names no blocks.
    """
    if split_config.kind not in ("auto", "given") or table.block is None:
        return table, 1
    n_blocks = split_config.n_blocks if "n_blocks" in split_config.model_fields_set else n_planned
    if not n_blocks:
        raise TacitaError(
            f"{table.name} names its own blocks, so one person's rows could decide how many there are, and how much "
            "noise; say how many there are with split.n_blocks (or privacy.blocks, which a budget is for)."
        )
    return select_rows(table, np.flatnonzero(table.block < n_blocks)), n_blocks


def find_quantile_cuts(n: int, config: SplitConfig) -> list[int]:
    """Block borders by count: the base share, then equal blocks, the last one takes the rest."""
    if config.n_blocks == 1:
        return [0, n]
    share = _read_base_share(config)
    n_later = config.n_blocks - 1
    base = int(share * n)
    later_share = (1 - share) / n_later
    step = int(later_share * n)
    if base < 1 or step < 1:
        raise TacitaError(f"{n} interactions are too few for {config.n_blocks} blocks; lower split.n_blocks.")
    borders = [base + step * number for number in range(n_later)]
    return [0, *borders, n]


def _read_base_share(config: SplitConfig) -> Fraction:
    share = Fraction(str(config.base_share))
    if share == 1 and config.n_blocks > 1:
        raise TacitaError("split.base_share = 1 leaves nothing for later blocks; lower it or set split.n_blocks = 1.")
    return share


def assign_blocks(table: Interactions, rows: Longs, config: SplitConfig) -> Longs:
    """The block of each of these rows, which are in time order, by dates or by each person's own rows."""
    if config.borders == "person":
        block = _cut_each_person(table.user[rows], config)
    else:
        assert isinstance(config.borders, list)
        borders = _parse_borders(config.borders, table)
        block = np.searchsorted(borders, _read_times(table)[rows], side="right")
    _refuse_empty_blocks(block, config)
    return block.astype(np.int64)


def _cut_each_person(user: Ints, config: SplitConfig) -> Longs:
    """The first share of everybody's own rows, then equal parts of the rest; the middle of a row decides."""
    n = np.bincount(user)[user]
    rank = rank_in_user(user, np.arange(len(user)))
    share = _read_base_share(config)
    n_later = config.n_blocks - 1
    block = np.zeros(len(user), np.int64)
    for number in range(n_later):
        border = share + (1 - share) * number / n_later
        block += (2 * rank + 1) * border.denominator >= 2 * n * border.numerator
    return block


def _read_times(table: Interactions) -> Longs:
    assert table.timestamp is not None  # refused before
    return table.timestamp


def _parse_borders(borders: Sequence[str | float], table: Interactions) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Borders as numbers in the unit of a table's times."""
    times = []
    for border in borders:
        number = _parse_date(border, table) if isinstance(border, str) else float(border)
        times.append(number)
    if times != sorted(set(times)):
        raise TacitaError("split.borders must ascend, each date once.")
    return np.array(times, np.float64)


def _parse_date(text: str, table: Interactions) -> float:
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise TacitaError(
            f"split.borders has '{text}', which is no date; write dates as '2020-01-31', or numbers in the unit of the "
            "data's times."
        ) from None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    unit = table.time_unit or guess_time_unit(_read_times(table))
    if unit is None:
        raise TacitaError(
            f"the times of {table.name} are no dates; write split.borders as numbers in their own unit instead of "
            f"'{text}'."
        )
    return date.timestamp() / SECONDS_PER_UNIT[unit]


def _refuse_empty_blocks(block: Longs, config: SplitConfig) -> None:
    sizes = np.bincount(block, minlength=config.n_blocks)
    empty_blocks = np.flatnonzero(sizes == 0)
    if len(empty_blocks):
        raise TacitaError(
            f"no row falls into block {empty_blocks[0]} of {config.n_blocks}; change split.borders or lower "
            "split.n_blocks."
        )
