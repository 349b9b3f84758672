"""Steps of the interest model: a recurrent state and a tower over it; a batch holds whole people.

A model is a private vector for each person, a row for each item, and all that is shared, one piece after another; `at`
says where each piece begins (see `PIECES`), `layers` and `biases` the same of the tower. Products over all samples or
all events of a batch are BLAS's. A client's numbers are its own, so they do not depend on other clients. The loops run
on one core, for callers that keep every core busy. No sum may be reordered by the compiler: a loop that is compiled
with its caller would then round otherwise than the same loop by itself, and a first run otherwise than those that find
it compiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from tacita.core.types import Floats, Ints, Longs
from tacita.kernels.adam import adam_step_row, adam_step_used_rows
from tacita.kernels.interest_states import (
    CENTRE,
    GAPS,
    add_to_total_and_centre,
    backprop_states,
    compute_states,
    gather_events,
)
from tacita.kernels.interest_tower import compute_batch_slopes


@njit(inline="always")
def _find_batch_users(order: Longs, owner: Ints, person: Longs) -> Any:
    """Whose samples a batch holds: people one after another, `person` says which of them a sample belongs to."""
    users = np.empty(len(order), np.int64)
    n = 0
    for k in range(len(order)):
        user = owner[order[k]]
        if n == 0 or users[n - 1] != user:
            users[n] = user
            n += 1
        person[k] = n - 1
    return users[:n]


@njit(nogil=True, cache=True, error_model="numpy")
def _choose_states(order: Longs, fold: Ints, n_folds: int, person: Longs) -> None:
    """`person` becomes the state that each sample reads: that of its own fold, which was made without it."""
    if n_folds > 1:
        for k in range(len(order)):
            person[k] = person[k] * n_folds + fold[order[k]]


@njit(nogil=True, cache=True, error_model="numpy")
def _gather_samples(order: Longs, row_of: Ints, label: Floats, rows: Floats) -> Any:
    """Rows in use, labels and the rows themselves of some samples."""
    n = len(order)
    used = np.empty(n, np.int64)
    labels = np.empty(n, np.float32)
    d = rows.shape[1]
    item = np.empty((n, d), np.float32)
    for k in range(n):
        sample = order[k]
        used[k] = row_of[sample]
        labels[k] = label[sample]
        row = rows[used[k]]
        for j in range(d):
            item[k, j] = row[j]
    return used, labels, item


@njit(nogil=True, cache=True, error_model="numpy")
def _collect_users(order: Longs, owner: Ints, first: int, place: Longs) -> Any:
    """All whose samples these are, in order; `place`, -1 everywhere, then says which of them a user is."""
    users = np.empty(len(order), np.int64)
    n = 0
    for k in range(len(order)):
        user = owner[order[k]]
        if place[user - first] < 0:
            place[user - first] = n
            users[n] = user
            n += 1
    return users[:n]


@njit(nogil=True, cache=True, error_model="numpy")
def run_interest_steps(
    first: int,
    last: int,
    at: Longs,
    layers: Longs,
    biases: Longs,
    sizes: Longs,
    g: int,
    mu: np.float32,
    n_folds: int,
    decay: np.float32,
    batches_per_group: Longs,
    batch_ptr: Longs,
    batch_start: Longs,
    order: Longs,
    owner: Ints,
    row_of: Ints,
    label: Floats,
    context_ptr: Longs,
    context_row: Ints,
    rating: Floats,
    gap: Ints,
    event_fold: Ints,
    sample_fold: Ints,
    row_start: Longs,
    rows: Floats,
    user_ptr: Longs,
    private: Floats,
    flats: Floats,
    rate: Floats,
    row_rate: Floats,
    flat_rate: Floats,
) -> None:
    """All steps of clients first..last-1; Adam begins afresh.

    The states of the people of a group are computed before the first of its batches and stand still; what they come
    from, and the rows that they read, move with the last, by the mean of all slopes. The tower moves with every batch.
    With `n_folds` above 1 a person has a state for each fold, of the events outside it, and an item reads that of its
    own fold: no item is scored by a state that was made of it. A centre of states becomes the mean of the client's
    in its last epoch.
    """
    d_flat = np.empty(flats.shape[1], np.float32)
    recurrent = at[GAPS]  # the tower comes first, then all else
    ends = at[CENTRE] if at[CENTRE] >= 0 else flats.shape[1]  # the centre is no parameter that learns
    d = rows.shape[1]
    for c in range(first, last):
        own_rows = rows[row_start[c] : row_start[c + 1]]
        flat = flats[c]
        first_user = user_ptr[c]
        users = private[first_user : user_ptr[c + 1]]
        mean = np.zeros_like(own_rows)
        square = np.zeros_like(own_rows)
        steps = np.zeros(len(own_rows), np.int64)
        user_mean = np.zeros_like(users)
        user_square = np.zeros_like(users)
        user_steps = np.zeros(len(users), np.int64)
        flat_mean = np.zeros_like(flat)
        flat_square = np.zeros_like(flat)
        step = 0
        turn = 0
        slot = np.full(len(own_rows), -1, np.int64)
        place = np.full(len(users), -1, np.int64)
        centre = np.zeros(d, np.float32)
        for epoch in range(len(order)):
            start = batch_start[epoch]
            centre[:] = 0
            n_states = 0
            for begin in range(batch_ptr[c], batch_ptr[c + 1], batches_per_group[c]):
                end = min(begin + batches_per_group[c], batch_ptr[c + 1])
                group_order = order[epoch, start[begin] : start[end]]
                group = _collect_users(group_order, owner, first_user, place)
                ptr, read, events, bucket = gather_events(
                    at, g, n_folds, group, context_ptr, context_row, rating, gap, event_fold, own_rows, flat
                )
                h = np.empty((len(group) * n_folds, d), np.float32)
                dh = np.zeros((len(group) * n_folds, d), np.float32)
                x = np.empty((len(events), d), np.float32)
                trace = np.empty((len(events), 5 * d), np.float32)
                compute_states(flat, at, g, ptr, events, h, x, trace)
                add_to_total_and_centre(flat, at, h, centre)
                n_states += len(h)
                share = np.float32(1.0 / (end - begin))
                for b in range(begin, end):
                    batch = order[epoch, start[b] : start[b + 1]]
                    person = np.empty(len(batch), np.int64)
                    people = _find_batch_users(batch, owner, person)
                    _choose_states(batch, sample_fold, n_folds, person)
                    used, labels, item = _gather_samples(batch, row_of, label, own_rows)
                    p = np.empty((len(people), d), np.float32)
                    state = np.empty((len(people) * n_folds, d), np.float32)
                    for u in range(len(people)):
                        p[u] = private[people[u]]
                        k = place[people[u] - first_user]
                        state[u * n_folds : (u + 1) * n_folds] = h[k * n_folds : (k + 1) * n_folds]
                    dp, d_state, d_item = compute_batch_slopes(
                        flat, at, layers, biases, sizes, mu, p, state, person, item, labels, d_flat
                    )
                    step += 1
                    for u in range(len(people)):
                        k = people[u] - first_user
                        user_steps[k] += 1
                        adam_step_row(users[k], dp[u], user_mean[k], user_square[k], user_steps[k], rate, decay)
                        for f in range(n_folds):
                            dh[place[k] * n_folds + f] += share * d_state[u * n_folds + f]
                    if b == end - 1:
                        turn += 1
                        d_flat[recurrent:] = 0
                        d_events = backprop_states(flat, at, g, ptr, events, bucket, x, trace, dh, d_flat)
                        used = np.concatenate((used, read))
                        d_item = np.concatenate((d_item, d_events), 0)
                        adam_step_row(
                            flat[recurrent:ends],
                            d_flat[recurrent:ends],
                            flat_mean[recurrent:ends],
                            flat_square[recurrent:ends],
                            turn,
                            flat_rate[recurrent:ends],
                            decay,
                        )
                    adam_step_row(
                        flat[:recurrent],
                        d_flat[:recurrent],
                        flat_mean[:recurrent],
                        flat_square[:recurrent],
                        step,
                        flat_rate[:recurrent],
                        decay,
                    )
                    adam_step_used_rows(used, d_item, slot, own_rows, mean, square, steps, row_rate, decay)
                for u in range(len(group)):
                    place[group[u] - first_user] = -1
        if at[CENTRE] >= 0 and n_states > 0:
            flat[ends : ends + d] = centre / np.float32(n_states)


@njit(nogil=True, cache=True, error_model="numpy")
def _step_personal(personal: Floats, grad: Floats, own: Floats, rate: np.float32, lam: np.float32) -> None:
    """One step of a personal model, which is pulled to the one it leans on."""
    for j in range(len(personal)):
        personal[j] -= rate * (grad[j] + lam * (personal[j] - own[j]))


@njit(nogil=True, cache=True, error_model="numpy")
def _pull_to_personal(own: Floats, personal: Floats, share: np.float32) -> None:
    for j in range(len(own)):
        own[j] -= share * (own[j] - personal[j])


@njit(nogil=True, cache=True, error_model="numpy")
def run_interest_pfedme_steps(
    first: int,
    last: int,
    at: Longs,
    layers: Longs,
    biases: Longs,
    sizes: Longs,
    g: int,
    mu: np.float32,
    inner: int,
    rate: np.float32,
    lam: np.float32,
    eta: np.float32,
    batch_ptr: Longs,
    batch_start: Longs,
    order: Longs,
    owner: Ints,
    row_of: Ints,
    label: Floats,
    context_ptr: Longs,
    context_row: Ints,
    rating: Floats,
    gap: Ints,
    row_start: Longs,
    user_ptr: Longs,
    rows: Floats,
    private: Floats,
    flats: Floats,
    personal_rows: Floats,
    personal_private: Floats,
    personal_flats: Floats,
) -> None:
    """All steps of pFedMe of clients first..last-1: `inner` plain ones of the personal model, which the other follows.

    `rows`, `private` and `flats` are what is leaned on; the personal models begin as the same.
    """
    d_flat = np.empty(flats.shape[1], np.float32)
    recurrent = at[GAPS]
    d = rows.shape[1]
    centre = np.zeros(d, np.float32)
    share = eta * lam
    for c in range(first, last):
        local_rows = rows[row_start[c] : row_start[c + 1]]
        own_rows = personal_rows[row_start[c] : row_start[c + 1]]
        flat = personal_flats[c]
        first_user = user_ptr[c]
        local_users = private[first_user : user_ptr[c + 1]]
        users = personal_private[first_user : user_ptr[c + 1]]
        d_users = np.empty_like(users)
        d_rows = np.empty_like(own_rows)
        for epoch in range(len(order)):
            start = batch_start[epoch]
            for b in range(batch_ptr[c], batch_ptr[c + 1]):
                batch = order[epoch, start[b] : start[b + 1]]
                person = np.empty(len(batch), np.int64)
                people = _find_batch_users(batch, owner, person)
                p = np.empty((len(people), d), np.float32)
                h = np.empty((len(people), d), np.float32)
                for _ in range(inner):
                    used, labels, item = _gather_samples(batch, row_of, label, own_rows)
                    ptr, read, events, bucket = gather_events(
                        at, g, 1, people, context_ptr, context_row, rating, gap, context_row, own_rows, flat
                    )
                    x = np.empty((len(events), d), np.float32)
                    trace = np.empty((len(events), 5 * d), np.float32)
                    for u in range(len(people)):
                        p[u] = personal_private[people[u]]
                    d_flat[recurrent:] = 0
                    compute_states(flat, at, g, ptr, events, h, x, trace)
                    add_to_total_and_centre(flat, at, h, centre)
                    dp, dh, d_item = compute_batch_slopes(
                        flat, at, layers, biases, sizes, mu, p, h, person, item, labels, d_flat
                    )
                    d_events = backprop_states(flat, at, g, ptr, events, bucket, x, trace, dh, d_flat)
                    d_users[:] = 0
                    d_rows[:] = 0
                    for u in range(len(people)):
                        d_users[people[u] - first_user] = dp[u]
                    for i in range(len(item)):
                        d_rows[used[i]] += d_item[i]
                    for e in range(len(events)):
                        d_rows[read[e]] += d_events[e]
                    _step_personal(flat, d_flat, flats[c], rate, lam)
                    _step_personal(own_rows.reshape(-1), d_rows.reshape(-1), local_rows.reshape(-1), rate, lam)
                    _step_personal(users.reshape(-1), d_users.reshape(-1), local_users.reshape(-1), rate, lam)
                _pull_to_personal(flats[c], flat, share)
                _pull_to_personal(local_rows.reshape(-1), own_rows.reshape(-1), share)
                _pull_to_personal(local_users.reshape(-1), users.reshape(-1), share)
