"""Indices of a cohort that several continual methods need: the client of each user, and where lists begin."""

from __future__ import annotations

import numpy as np

from tacita.core.types import AnyArray, CohortView, Ints, Longs


def find_clients_of_users(view: CohortView) -> Ints:
    """(users,) the place of each user's client in the cohort."""
    n_users = np.diff(view.user_ptr)
    clients = np.arange(view.n_clients, dtype=np.int32)
    return np.repeat(clients, n_users)


def cumulate_counts(counts: AnyArray) -> Longs:
    """Where each list begins and the last one ends, from the lengths of all lists."""
    n_lists = len(counts)
    ptr = np.zeros(n_lists + 1, np.int64)
    np.cumsum(counts, out=ptr[1:])
    return ptr
