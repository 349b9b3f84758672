"""Steps of NeuMF and NeuNCF on clients of several people, by lazy Adam or pFedMe, all steps at once.

The tower is in kernels/silo_tower.py. A client is trained alone, so its numbers do not depend on other clients.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tacita.core.types import Floats, Ints, Longs
from tacita.kernels.adam import adam_step_row_at, adam_step_vector, compute_bias_correction
from tacita.kernels.products import prefetch_row
from tacita.kernels.silo_tower import run_silo_backward, run_silo_forward, step_towards
from tacita.kernels.tower import compute_piece_offsets, turn_logits_into_slopes


@njit(nogil=True, cache=True)
def _find_largest(ptr: Longs, first: int, last: int) -> int:
    most = 0
    for c in range(first, last):
        most = max(most, ptr[c + 1] - ptr[c])
    return most


@njit(nogil=True, cache=True)
def _find_largest_batch(batch_ptr: Longs, batch_start: Longs, first: int, last: int) -> int:
    most = 0
    for epoch in range(len(batch_start)):
        for b in range(batch_ptr[first], batch_ptr[last]):
            most = max(most, batch_start[epoch, b + 1] - batch_start[epoch, b])
    return most


@njit(nogil=True, cache=True)
def _list_distinct(places: Longs, slot: Longs, distinct: Longs) -> int:
    """The different places, in the order they come, each place becoming its number; `slot` is -1 before and after."""
    n = 0
    for k in range(len(places)):
        place = places[k]
        if slot[place] < 0:
            slot[place] = n
            distinct[n] = place
            n += 1
        places[k] = slot[place]
    for k in range(n):
        slot[distinct[k]] = -1
    return n


@njit(nogil=True, cache=True)
def _prefetch_rows(table: Floats, which: Longs) -> None:
    """Asks for rows that are far away, all at once."""
    for k in range(len(which)):
        prefetch_row(table, which[k])


@njit(nogil=True, cache=True)
def _gather_rows(table: Floats, which: Longs, out: Floats) -> None:
    for k in range(len(which)):
        source = table[which[k]]
        target = out[k]
        for j in range(len(target)):
            target[j] = source[j]


@njit(nogil=True, cache=True)
def _add_rows(rows: Floats, number: Longs, total: Floats) -> None:
    """Sums of the rows of each number."""
    total[:] = 0
    for k in range(len(rows)):
        source = rows[k]
        target = total[number[k]]
        for j in range(len(source)):
            target[j] += source[j]


@njit(nogil=True, cache=True)
def _read_batch(
    order: Longs, owner: Ints, first_user: int, row_of: Ints, label: Floats, person: Longs, row: Longs, wanted: Floats
) -> None:
    """Whose the samples of a batch are, counted within the client, their rows and their labels."""
    for k in range(len(order)):
        sample = order[k]
        person[k] = owner[sample] - first_user
        row[k] = row_of[sample]
        wanted[k] = label[sample]


@njit(nogil=True, cache=True)
def run_silo_adam_steps(
    first: int,
    last: int,
    g: int,
    sizes: Longs,
    batch_ptr: Longs,
    batch_start: Longs,  # (epochs, batches + 1)
    order: Longs,  # (epochs, turns)
    owner: Ints,
    user_ptr: Longs,
    row_of: Ints,
    label: Floats,
    row_start: Longs,
    rows: Floats,
    private: Floats,
    flats: Floats,  # (clients, shared)
    rate: Floats,  # (private width,)
    row_rate: np.float32,
    flat_rates: Floats,  # one a piece
    decay: np.float32,
) -> None:
    """All steps of clients first..last-1, each with Adam's moments begun afresh."""
    w = rows.shape[1]
    at = compute_piece_offsets(sizes, w - g, g)
    most = _find_largest_batch(batch_ptr, batch_start, first, last)
    most_rows = _find_largest(row_start, first, last)
    most_users = _find_largest(user_ptr, first, last)
    n_steps = _find_largest(batch_ptr, first, last) * len(order)
    correction = np.array([compute_bias_correction(max(1, k)) for k in range(n_steps + 1)])
    scratch = np.empty(2 * most * sizes.sum(), np.float32)
    item = np.empty((most, w), np.float32)
    d_item = np.empty((most, w), np.float32)
    d_rows = np.empty((most, w), np.float32)
    people = np.empty((min(most, most_users), w), np.float32)
    d_people = np.empty((min(most, most_users), w), np.float32)
    person = np.empty(most, np.int64)
    row = np.empty(most, np.int64)
    users = np.empty(most, np.int64)
    used = np.empty(most, np.int64)
    wanted = np.empty(most, np.float32)
    flat_mean = np.empty(flats.shape[1], np.float32)
    flat_square = np.empty(flats.shape[1], np.float32)
    mean = np.empty((most_rows, w), np.float32)
    square = np.empty((most_rows, w), np.float32)
    own_mean = np.empty((most_users, w), np.float32)
    own_square = np.empty((most_users, w), np.float32)
    row_steps = np.empty(most_rows, np.int64)
    user_steps = np.empty(most_users, np.int64)
    row_slot = np.full(most_rows, -1, np.int64)
    user_slot = np.full(most_users, -1, np.int64)
    for c in range(first, last):
        own_rows = rows[row_start[c] : row_start[c + 1]]
        own_users = private[user_ptr[c] : user_ptr[c + 1]]
        flat_mean[:] = 0
        flat_square[:] = 0
        mean[: len(own_rows)] = 0
        square[: len(own_rows)] = 0
        own_mean[: len(own_users)] = 0
        own_square[: len(own_users)] = 0
        row_steps[: len(own_rows)] = 0
        user_steps[: len(own_users)] = 0
        step = 0
        for epoch in range(len(order)):
            start = batch_start[epoch]
            for b in range(batch_ptr[c], batch_ptr[c + 1]):
                batch = order[epoch, start[b] : start[b + 1]]
                m = len(batch)
                _read_batch(batch, owner, user_ptr[c], row_of, label, person[:m], row[:m], wanted[:m])
                _prefetch_rows(own_rows, row[:m])
                _gather_rows(own_rows, row[:m], item[:m])
                n_users = _list_distinct(person[:m], user_slot, users)
                n_rows = _list_distinct(row[:m], row_slot, used)
                _gather_rows(own_users, users[:n_users], people[:n_users])
                _prefetch_rows(mean, used[:n_rows])
                _prefetch_rows(square, used[:n_rows])
                step += 1
                _take_shared_step(
                    flats[c],
                    at,
                    sizes,
                    g,
                    people[:n_users],
                    person[:m],
                    item[:m],
                    wanted[:m],
                    scratch,
                    d_people[:n_users],
                    d_item[:m],
                    True,
                    flat_mean,
                    flat_square,
                    flat_rates,
                    correction[step],
                    decay,
                )
                _add_rows(d_item[:m], row[:m], d_rows[:n_rows])
                for k in range(n_users):
                    u = users[k]
                    user_steps[u] += 1
                    scale = correction[user_steps[u]]
                    of_user = slice(u, u + 1)
                    adam_step_row_at(
                        0,
                        own_users[of_user],
                        d_people[k : k + 1],
                        own_mean[of_user],
                        own_square[of_user],
                        scale,
                        rate,
                        decay,
                    )
                for k in range(n_rows):
                    r = used[k]
                    row_steps[r] += 1
                    scale = correction[row_steps[r]]
                    adam_step_vector(own_rows[r], d_rows[k], mean[r], square[r], scale, row_rate, decay)


@njit(nogil=True, cache=True, error_model="numpy")
def _take_shared_step(
    flat: Floats,
    at: Longs,
    sizes: Longs,
    g: int,
    people: Floats,
    person: Longs,
    item: Floats,
    label: Floats,
    scratch: Floats,
    d_people: Floats,
    d_item: Floats,
    adam: bool,
    first: Floats,
    second: Floats,
    rates: Floats,
    factor: np.float32,
    decay: np.float32,
) -> None:
    """Moves what is shared by the mean loss of a batch, and writes the slopes of people's vectors and samples' rows.

    `scratch` has room for two outputs of every layer and sample.
    """
    n = len(item)
    size = n * sizes.sum()
    up = scratch[:size]
    down = scratch[size : 2 * size]
    logit = run_silo_forward(flat, at, sizes, g, people, person, item, up)
    turn_logits_into_slopes(logit, label, np.full(n, np.float32(1.0 / n)))
    run_silo_backward(
        flat,
        at,
        sizes,
        g,
        people,
        person,
        item,
        up,
        logit,
        down,
        d_people,
        d_item,
        adam,
        first,
        second,
        rates,
        factor,
        decay,
    )


@njit(nogil=True, cache=True)
def _apply_missed_pulls(personal: Floats, own: Floats, missed: int, inner: float, share: float) -> None:
    """What some steps without a sample do to a personal vector and the local one it leans on, in closed form."""
    per_step = inner * (1 - share)
    remaining = per_step**missed
    covered = float(missed) if per_step == 1 else (1 - remaining) / (1 - per_step)
    follow = np.float32(share * inner * covered)
    left_share = np.float32(remaining)
    for j in range(len(personal)):
        distance = personal[j] - own[j]
        own[j] += follow * distance
        personal[j] = own[j] + left_share * distance


@njit(nogil=True, cache=True)
def _apply_missed_pulls_to_rows(
    which: Longs, step: int, personal: Floats, own: Floats, last_step: Longs, inner: float, share: float
) -> None:
    """Makes up for the steps that did not use these rows; from now on they wait at the step after this one."""
    for k in range(len(which)):
        r = which[k]
        missed = step - last_step[r]
        if missed > 0:
            _apply_missed_pulls(personal[r], own[r], missed, inner, share)
        last_step[r] = step + 1


@njit(nogil=True, cache=True, error_model="numpy")
def _step_personal(
    which: Longs, grad: Floats, personal: Floats, own: Floats, rate: np.float32, lam: np.float32
) -> None:
    """A step of some personal vectors down their slopes and towards the local ones."""
    for k in range(len(which)):
        step_towards(personal[which[k]], grad[k], own[which[k]], rate, lam)


@njit(nogil=True, cache=True)
def _pull_to_personal(which: Longs, personal: Floats, own: Floats, share: np.float32) -> None:
    for k in range(len(which)):
        target = own[which[k]]
        leader = personal[which[k]]
        for j in range(len(target)):
            target[j] -= share * (target[j] - leader[j])


@njit(nogil=True, cache=True)
def run_silo_pfedme_steps(
    first: int,
    last: int,
    g: int,
    sizes: Longs,
    batch_ptr: Longs,
    batch_start: Longs,
    order: Longs,
    owner: Ints,
    user_ptr: Longs,
    row_of: Ints,
    label: Floats,
    row_start: Longs,
    rows: Floats,
    private: Floats,
    flats: Floats,
    personal_rows: Floats,
    personal_private: Floats,
    personal_flats: Floats,
    n_inner: int,
    inner_lr: float,
    lam: float,
    eta: float,
) -> None:
    """All steps of clients first..last-1; personal models begin as what is leaned on, in `rows`, `private`, `flats`."""
    w = rows.shape[1]
    at = compute_piece_offsets(sizes, w - g, g)
    most = _find_largest_batch(batch_ptr, batch_start, first, last)
    most_rows = _find_largest(row_start, first, last)
    most_users = _find_largest(user_ptr, first, last)
    scratch = np.empty(2 * most * sizes.sum(), np.float32)
    item = np.empty((most, w), np.float32)
    d_item = np.empty((most, w), np.float32)
    d_rows = np.empty((most, w), np.float32)
    people = np.empty((min(most, most_users), w), np.float32)
    d_people = np.empty((min(most, most_users), w), np.float32)
    person = np.empty(most, np.int64)
    row = np.empty(most, np.int64)
    row_number = np.empty(most, np.int64)
    users = np.empty(most, np.int64)
    used = np.empty(most, np.int64)
    wanted = np.empty(most, np.float32)
    whole = np.zeros(1, np.int64)
    last_rows = np.empty(most_rows, np.int64)
    last_users = np.empty(most_users, np.int64)
    row_slot = np.full(most_rows, -1, np.int64)
    user_slot = np.full(most_users, -1, np.int64)
    rate = np.float32(inner_lr)
    rates = np.full(len(at) - 1, rate)
    nothing = np.zeros(0, np.float32)
    pull = np.float32(lam)
    share = np.float32(eta * lam)
    inner = (1 - inner_lr * lam) ** n_inner  # of the distance, what the inner steps leave
    for c in range(first, last):
        own_rows = rows[row_start[c] : row_start[c + 1]]
        own_users = private[user_ptr[c] : user_ptr[c + 1]]
        my_rows = personal_rows[row_start[c] : row_start[c + 1]]
        my_users = personal_private[user_ptr[c] : user_ptr[c + 1]]
        own_flat = flats[c : c + 1]
        flat = personal_flats[c : c + 1]
        last_rows[: len(own_rows)] = 0
        last_users[: len(own_users)] = 0
        step = 0
        for epoch in range(len(order)):
            start = batch_start[epoch]
            for b in range(batch_ptr[c], batch_ptr[c + 1]):
                batch = order[epoch, start[b] : start[b + 1]]
                m = len(batch)
                _read_batch(batch, owner, user_ptr[c], row_of, label, person[:m], row[:m], wanted[:m])
                row_number[:m] = row[:m]
                n_users = _list_distinct(person[:m], user_slot, users)
                n_rows = _list_distinct(row_number[:m], row_slot, used)
                _prefetch_rows(own_rows, used[:n_rows])
                _prefetch_rows(my_rows, used[:n_rows])
                _apply_missed_pulls_to_rows(users[:n_users], step, my_users, own_users, last_users, inner, eta * lam)
                _apply_missed_pulls_to_rows(used[:n_rows], step, my_rows, own_rows, last_rows, inner, eta * lam)
                for _ in range(n_inner):
                    _gather_rows(my_rows, row[:m], item[:m])
                    _gather_rows(my_users, users[:n_users], people[:n_users])
                    _take_shared_step(
                        flat[0],
                        at,
                        sizes,
                        g,
                        people[:n_users],
                        person[:m],
                        item[:m],
                        wanted[:m],
                        scratch,
                        d_people[:n_users],
                        d_item[:m],
                        False,
                        own_flat[0],
                        nothing,
                        rates,
                        pull,
                        pull,
                    )
                    _add_rows(d_item[:m], row_number[:m], d_rows[:n_rows])
                    _step_personal(users[:n_users], d_people, my_users, own_users, rate, pull)
                    _step_personal(used[:n_rows], d_rows, my_rows, own_rows, rate, pull)
                _pull_to_personal(whole, flat, own_flat, share)
                _pull_to_personal(users[:n_users], my_users, own_users, share)
                _pull_to_personal(used[:n_rows], my_rows, own_rows, share)
                step += 1
        _apply_missed_pulls_to_rows(np.arange(len(own_users)), step, my_users, own_users, last_users, inner, eta * lam)
        _apply_missed_pulls_to_rows(np.arange(len(own_rows)), step, my_rows, own_rows, last_rows, inner, eta * lam)
