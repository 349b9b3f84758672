"""A recurrent state and a tower over it, up and down again by hand: a batch holds whole people, a state is made once.

A model is a private vector for each person, a row for each item, and all that is shared, one piece after another; `at`
says where each piece begins (see `PIECES`), `layers` and `biases` the same of the tower. Products over all samples or
all events of a batch are BLAS's; the recurrence itself is a product of one vector, which a plain loop does as well. A
client's numbers are its own, so they do not depend on the company. The loops run on one core, for callers that keep
every core busy. No sum may be reordered by the compiler: a loop that is compiled with its caller would then round
otherwise than the same loop by itself, and a first run otherwise than those that find it compiled.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from tacita.core.types import Floats, Ints, Longs
from tacita.kernels.adam import adam_used_rows, move_row
from tacita.kernels.tower import apply_relu, backprop_relu, bce_slopes, sum_columns, view_matrix

PIECES = (
    "user_layer", "state_layer", "out", "out_bias", "gaps", "event_layer", "event_bias", "gru_in", "gru_in_bias",
    "gru_state", "gru_state_bias",
)  # fmt: skip
_USER, _STATE, _OUT, _OUT_BIAS, _GAPS, _EVENT, _EVENT_BIAS, _IN, _IN_BIAS, _OWN, _OWN_BIAS = range(11)
_ONE = np.float32(1.0)
_SMALL = np.float32(1e-8)


@njit(nogil=True, cache=True, error_model="numpy")
def _step_gru(gate: Floats, told: Floats, own: Floats, h: Floats, kept: Floats, e: int) -> None:
    """One event of one person: `told` is the event's share, `own` the state's; h becomes the next state.

    Keeps of event e what the way back needs: r, z, n, the state's share of n, and the state before.
    """
    d = len(h)
    for j in range(2 * d):
        gate[j] = _ONE / (_ONE + np.exp(-(told[j] + own[j])))
    for j in range(d):
        fresh = np.tanh(told[2 * d + j] + gate[j] * own[2 * d + j])
        kept[e, j] = gate[j]
        kept[e, d + j] = gate[d + j]
        kept[e, 2 * d + j] = fresh
        kept[e, 3 * d + j] = own[2 * d + j]
        kept[e, 4 * d + j] = h[j]
        h[j] = h[j] + (_ONE - gate[d + j]) * (fresh - h[j])


@njit(nogil=True, cache=True, error_model="numpy")
def _apply_affine(h: Floats, table: Floats, bias: Floats, out: Floats) -> None:
    """out = h table + bias."""
    out[:] = bias
    for k in range(len(h)):
        x = h[k]
        for j in range(table.shape[1]):
            out[j] += x * table[k, j]


@njit(nogil=True, cache=True, error_model="numpy")
def _backprop_gru(dh: Floats, kept: Floats, e: int, d_told: Floats, d_own: Floats, turned: Floats) -> None:
    """The way back through one event: dh becomes the slope of the state before it; `turned`: its matrix's transpose."""
    d = len(dh)
    for j in range(d):
        r, z, n = kept[e, j], kept[e, d + j], kept[e, 2 * d + j]
        of_n = dh[j] * (_ONE - z) * (_ONE - n * n)
        of_r = of_n * kept[e, 3 * d + j] * r * (_ONE - r)
        of_z = dh[j] * (kept[e, 4 * d + j] - n) * z * (_ONE - z)
        d_told[e, j] = of_r
        d_own[e, j] = of_r
        d_told[e, d + j] = of_z
        d_own[e, d + j] = of_z
        d_told[e, 2 * d + j] = of_n
        d_own[e, 2 * d + j] = of_n * r
        dh[j] *= z
    for j in range(3 * d):
        x = d_own[e, j]
        for k in range(d):
            dh[k] += x * turned[j, k]


@njit(nogil=True, cache=True, error_model="numpy")
def compute_states(
    flat: Floats, at: Longs, g: int, ptr: Longs, events: Floats, h: Floats, x: Floats, kept: Floats
) -> None:
    """h of every person from its events (events, d + 1 + g); `x` and `kept` keep what the way back needs."""
    d = h.shape[1]
    np.dot(events, view_matrix(flat, at[_EVENT], d + 1 + g, d), x)
    for e in range(len(x)):
        for j in range(d):
            x[e, j] += flat[at[_EVENT_BIAS] + j]
    told = np.dot(x, view_matrix(flat, at[_IN], d, 3 * d))
    own, gate = np.empty(3 * d, np.float32), np.empty(2 * d, np.float32)
    table, bias = view_matrix(flat, at[_OWN], d, 3 * d), flat[at[_OWN_BIAS] : at[_OWN_BIAS] + 3 * d]
    in_bias = flat[at[_IN_BIAS] : at[_IN_BIAS] + 3 * d]
    for u in range(len(h)):
        h[u] = 0
        for e in range(ptr[u], ptr[u + 1]):
            _apply_affine(h[u], table, bias, own)
            told[e] += in_bias
            _step_gru(gate, told[e], own, h[u], kept, e)


@njit(nogil=True, cache=True, error_model="numpy")
def _backprop_states(
    flat: Floats, at: Longs, g: int, ptr: Longs, events: Floats, bucket: Longs, x: Floats, kept: Floats, dh: Floats,
    d_flat: Floats,
) -> Floats:  # fmt: skip
    """Slopes of all that makes the states; returns those of the events' rows."""
    n, d = len(x), dh.shape[1]
    d_told, d_own = np.empty((n, 3 * d), np.float32), np.empty((n, 3 * d), np.float32)
    turned = np.ascontiguousarray(view_matrix(flat, at[_OWN], d, 3 * d).T)
    for u in range(len(dh)):
        for e in range(ptr[u + 1] - 1, ptr[u] - 1, -1):
            _backprop_gru(dh[u], kept, e, d_told, d_own, turned)
    before = np.ascontiguousarray(kept[:, 4 * d :])
    np.dot(before.T, d_own, view_matrix(d_flat, at[_OWN], d, 3 * d))
    sum_columns(d_own, d_flat[at[_OWN_BIAS] : at[_OWN_BIAS] + 3 * d])
    np.dot(x.T, d_told, view_matrix(d_flat, at[_IN], d, 3 * d))
    sum_columns(d_told, d_flat[at[_IN_BIAS] : at[_IN_BIAS] + 3 * d])
    dx = np.dot(d_told, view_matrix(flat, at[_IN], d, 3 * d).T)
    np.dot(events.T, dx, view_matrix(d_flat, at[_EVENT], d + 1 + g, d))
    sum_columns(dx, d_flat[at[_EVENT_BIAS] : at[_EVENT_BIAS] + d])
    d_events = np.dot(dx, view_matrix(flat, at[_EVENT], d + 1 + g, d).T)
    for e in range(n):
        for j in range(g):
            d_flat[at[_GAPS] + bucket[e] * g + j] += d_events[e, d + 1 + j]
    return np.ascontiguousarray(d_events[:, :d])


@njit(nogil=True, cache=True, error_model="numpy")
def _run_forward(
    flat: Floats, at: Longs, layers: Longs, biases: Longs, sizes: Longs, people: Floats, person: Longs, item: Floats,
    up: Floats, logit: Floats,
) -> None:  # fmt: skip
    """Logits of samples; `people`: what the first layer gets of each person, `person` whose sample it is."""
    n, d = item.shape
    now = view_matrix(up, 0, n, sizes[0])
    np.dot(item, view_matrix(flat, layers[0], d, sizes[0]), now)
    for i in range(n):
        for j in range(sizes[0]):
            now[i, j] += people[person[i], j]
    apply_relu(now, flat[biases[0] : biases[0] + sizes[0]])
    start = n * sizes[0]
    for k in range(1, len(sizes)):
        after = view_matrix(up, start, n, sizes[k])
        np.dot(now, view_matrix(flat, layers[k], sizes[k - 1], sizes[k]), after)
        apply_relu(after, flat[biases[k] : biases[k] + sizes[k]])
        start += n * sizes[k]
        now = after
    np.dot(now, flat[at[_OUT] : at[_OUT] + sizes[-1]], logit)
    logit += flat[at[_OUT_BIAS]]


@njit(nogil=True, cache=True, error_model="numpy")
def _run_backward(
    flat: Floats, at: Longs, layers: Longs, biases: Longs, sizes: Longs, item: Floats, person: Longs, up: Floats,
    slope: Floats, d_flat: Floats, d_people: Floats,
) -> Floats:  # fmt: skip
    """Slopes of the tower and of what people put into it; returns those of the samples' rows."""
    n, d = item.shape
    k = len(sizes) - 1
    start = n * (sizes.sum() - sizes[k])
    now = view_matrix(up, start, n, sizes[k])
    out = flat[at[_OUT] : at[_OUT] + sizes[k]]
    np.dot(slope, now, d_flat[at[_OUT] : at[_OUT] + sizes[k]])
    d_flat[at[_OUT_BIAS]] = slope.sum()
    back = np.empty((n, sizes[k]), np.float32)
    for i in range(n):
        for j in range(sizes[k]):
            back[i, j] = slope[i] * out[j]
    backprop_relu(back, now)
    while k > 0:
        sum_columns(back, d_flat[biases[k] : biases[k] + sizes[k]])
        start -= n * sizes[k - 1]
        before = view_matrix(up, start, n, sizes[k - 1])
        np.dot(before.T, back, view_matrix(d_flat, layers[k], sizes[k - 1], sizes[k]))
        further = np.dot(back, view_matrix(flat, layers[k], sizes[k - 1], sizes[k]).T)
        backprop_relu(further, before)
        back = further
        k -= 1
    sum_columns(back, d_flat[biases[0] : biases[0] + sizes[0]])
    np.dot(item.T, back, view_matrix(d_flat, layers[0], d, sizes[0]))
    d_people[:] = 0
    for i in range(n):
        for j in range(sizes[0]):
            d_people[person[i], j] += back[i, j]
    d_item: Floats = np.dot(back, view_matrix(flat, layers[0], d, sizes[0]).T)
    return d_item


@njit(nogil=True, cache=True, error_model="numpy")
def _add_cosine_slopes(p: Floats, h: Floats, mu: np.float32, dp: Floats, dh: Floats) -> None:
    """Adds the slopes of mu (1 - cos(p, h)); what has no length has no direction."""
    pp, hh, ph = np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for j in range(len(p)):
        pp += p[j] * p[j]
        hh += h[j] * h[j]
        ph += p[j] * h[j]
    long_p, long_h = np.float32(max(math.sqrt(pp), 1e-8)), np.float32(max(math.sqrt(hh), 1e-8))
    cos = ph / (long_p * long_h)
    turns_p = cos / pp if pp > _SMALL * _SMALL else np.float32(0.0)
    turns_h = cos / hh if hh > _SMALL * _SMALL else np.float32(0.0)
    for j in range(len(p)):
        dp[j] -= mu * (h[j] / (long_p * long_h) - turns_p * p[j])
        dh[j] -= mu * (p[j] / (long_p * long_h) - turns_h * h[j])


@njit(inline="always")
def _find_users(order: Longs, owner: Ints, person: Longs) -> Any:
    """Whose samples a batch holds: people one after another, `person` says which of them a sample belongs to."""
    who = np.empty(len(order), np.int64)
    n = 0
    for k in range(len(order)):
        u = owner[order[k]]
        if n == 0 or who[n - 1] != u:
            who[n] = u
            n += 1
        person[k] = n - 1
    return who[:n]


@njit(nogil=True, cache=True, error_model="numpy")
def _tower_slopes(
    flat: Floats, at: Longs, layers: Longs, biases: Longs, sizes: Longs, mu: np.float32, p: Floats, h: Floats,
    person: Longs, item: Floats, wanted: Floats, d_flat: Floats,
) -> Any:  # fmt: skip
    """Slopes of one batch's loss: of the people's vectors and states and of the samples' rows; fills d_flat's tower."""
    n, d = item.shape
    user_layer, state_layer = view_matrix(flat, at[_USER], d, sizes[0]), view_matrix(flat, at[_STATE], d, sizes[0])
    people = np.dot(p, user_layer) + np.dot(h, state_layer)
    up, logit = np.empty(n * sizes.sum(), np.float32), np.empty(n, np.float32)
    _run_forward(flat, at, layers, biases, sizes, people, person, item, up, logit)
    bce_slopes(logit, wanted, np.full(n, np.float32(1.0 / n)))
    d_flat[:] = 0
    d_people = np.empty_like(people)
    d_item = _run_backward(flat, at, layers, biases, sizes, item, person, up, logit, d_flat, d_people)
    np.dot(p.T, d_people, view_matrix(d_flat, at[_USER], d, sizes[0]))
    np.dot(h.T, d_people, view_matrix(d_flat, at[_STATE], d, sizes[0]))
    dp, dh = np.dot(d_people, user_layer.T), np.dot(d_people, state_layer.T)
    for u in range(len(p)):
        _add_cosine_slopes(p[u], h[u], mu / np.float32(len(p)), dp[u], dh[u])
    return dp, dh, d_item


@njit(nogil=True, cache=True, error_model="numpy")
def _gather_events(
    at: Longs, g: int, who: Longs, context_ptr: Longs, context_row: Ints, rating: Floats, gap: Ints, mine: Floats,
    flat: Floats,
) -> Any:  # fmt: skip
    """What some people's states are made of: where each one's events begin, their rows, numbers and buckets."""
    d = mine.shape[1]
    ptr = np.zeros(len(who) + 1, np.int64)
    for u in range(len(who)):
        ptr[u + 1] = ptr[u] + context_ptr[who[u] + 1] - context_ptr[who[u]]
    read, bucket = np.empty(ptr[-1], np.int64), np.empty(ptr[-1], np.int64)
    events = np.empty((ptr[-1], d + 1 + g), np.float32)
    for u in range(len(who)):
        for k in range(ptr[u + 1] - ptr[u]):
            e, from_ = ptr[u] + k, context_ptr[who[u]] + k
            read[e], bucket[e] = context_row[from_], gap[from_]
            events[e, :d], events[e, d] = mine[read[e]], rating[from_]
            events[e, d + 1 :] = flat[at[_GAPS] + bucket[e] * g : at[_GAPS] + (bucket[e] + 1) * g]
    return ptr, read, events, bucket


@njit(nogil=True, cache=True, error_model="numpy")
def _gather_samples(order: Longs, row_of: Ints, label: Floats, mine: Floats) -> Any:
    """Rows in use, labels and the rows themselves of some samples."""
    used, wanted = np.empty(len(order), np.int64), np.empty(len(order), np.float32)
    item = np.empty((len(order), mine.shape[1]), np.float32)
    for k in range(len(order)):
        used[k], wanted[k] = row_of[order[k]], label[order[k]]
        item[k] = mine[used[k]]
    return used, wanted, item


@njit(nogil=True, cache=True, error_model="numpy")
def _collect_users(order: Longs, owner: Ints, first: int, place: Longs) -> Any:
    """Everybody whose samples these are, in order; `place`, -1 everywhere, then says which of them somebody is."""
    who = np.empty(len(order), np.int64)
    n = 0
    for k in range(len(order)):
        u = owner[order[k]]
        if place[u - first] < 0:
            place[u - first] = n
            who[n] = u
            n += 1
    return who[:n]


@njit(nogil=True, cache=True, error_model="numpy")
def interest_steps(
    first: int, last: int, at: Longs, layers: Longs, biases: Longs, sizes: Longs, g: int, mu: np.float32,
    decay: np.float32, held: Longs, batch_ptr: Longs, batch_start: Longs, order: Longs, owner: Ints, row_of: Ints,
    label: Floats, context_ptr: Longs, context_row: Ints, rating: Floats, gap: Ints, row_start: Longs, rows: Floats,
    user_ptr: Longs, private: Floats, flats: Floats, rate: Floats, row_rate: Floats, flat_rate: Floats,
) -> None:  # fmt: skip
    """All steps of clients first..last-1; Adam begins afresh.

    The states of the people of `held` batches are made before the first of these and stand still; what makes them, and
    the rows that they read, move with the last, by the mean of all slopes. The tower moves with every batch.
    """
    d_flat, recurrent = np.empty(flats.shape[1], np.float32), at[_GAPS]  # the tower comes first, then all else
    d = rows.shape[1]
    for c in range(first, last):
        mine, flat, users = rows[row_start[c] : row_start[c + 1]], flats[c], private[user_ptr[c] : user_ptr[c + 1]]
        mean, square, steps = np.zeros_like(mine), np.zeros_like(mine), np.zeros(len(mine), np.int64)
        own_mean, own_square, own_steps = np.zeros_like(users), np.zeros_like(users), np.zeros(len(users), np.int64)
        flat_mean, flat_square, step, turn = np.zeros_like(flat), np.zeros_like(flat), 0, 0
        slot, place = np.full(len(mine), -1, np.int64), np.full(len(users), -1, np.int64)
        for epoch in range(len(order)):
            for begin in range(batch_ptr[c], batch_ptr[c + 1], held[c]):
                end, start = min(begin + held[c], batch_ptr[c + 1]), batch_start[epoch]
                group = _collect_users(order[epoch, start[begin] : start[end]], owner, user_ptr[c], place)
                ptr, read, events, bucket = _gather_events(
                    at, g, group, context_ptr, context_row, rating, gap, mine, flat
                )  # fmt: skip
                h, dh = np.empty((len(group), d), np.float32), np.zeros((len(group), d), np.float32)
                x, kept = np.empty((len(events), d), np.float32), np.empty((len(events), 5 * d), np.float32)
                compute_states(flat, at, g, ptr, events, h, x, kept)
                share = np.float32(1.0 / (end - begin))
                for b in range(begin, end):
                    some = order[epoch, start[b] : start[b + 1]]
                    person = np.empty(len(some), np.int64)
                    who = _find_users(some, owner, person)
                    used, wanted, item = _gather_samples(some, row_of, label, mine)
                    p, state = np.empty((len(who), d), np.float32), np.empty((len(who), d), np.float32)
                    for u in range(len(who)):
                        p[u], state[u] = private[who[u]], h[place[who[u] - user_ptr[c]]]
                    dp, d_state, d_item = _tower_slopes(
                        flat, at, layers, biases, sizes, mu, p, state, person, item, wanted, d_flat
                    )  # fmt: skip
                    step += 1
                    for u in range(len(who)):
                        k = who[u] - user_ptr[c]
                        own_steps[k] += 1
                        move_row(users[k], dp[u], own_mean[k], own_square[k], own_steps[k], rate, decay)
                        dh[place[k]] += share * d_state[u]
                    if b == end - 1:
                        turn += 1
                        d_events = _backprop_states(flat, at, g, ptr, events, bucket, x, kept, dh, d_flat)
                        used, d_item = np.concatenate((used, read)), np.concatenate((d_item, d_events), 0)
                        move_row(
                            flat[recurrent:], d_flat[recurrent:], flat_mean[recurrent:], flat_square[recurrent:],
                            turn, flat_rate[recurrent:], decay,
                        )  # fmt: skip
                    move_row(
                        flat[:recurrent], d_flat[:recurrent], flat_mean[:recurrent], flat_square[:recurrent], step,
                        flat_rate[:recurrent], decay,
                    )  # fmt: skip
                    adam_used_rows(used, d_item, slot, mine, mean, square, steps, row_rate, decay)
                for u in range(len(group)):
                    place[group[u] - user_ptr[c]] = -1


@njit(nogil=True, cache=True, error_model="numpy")
def _step_personal(mine: Floats, grad: Floats, own: Floats, rate: np.float32, lam: np.float32) -> None:
    """One step of a personal model, which is held to the one it leans on."""
    for j in range(len(mine)):
        mine[j] -= rate * (grad[j] + lam * (mine[j] - own[j]))


@njit(nogil=True, cache=True, error_model="numpy")
def _move_local(own: Floats, mine: Floats, share: np.float32) -> None:
    for j in range(len(own)):
        own[j] -= share * (own[j] - mine[j])


@njit(nogil=True, cache=True, error_model="numpy")
def interest_pfedme_steps(
    first: int, last: int, at: Longs, layers: Longs, biases: Longs, sizes: Longs, g: int, mu: np.float32,
    inner: int, rate: np.float32, lam: np.float32, eta: np.float32, batch_ptr: Longs, batch_start: Longs, order: Longs,
    owner: Ints, row_of: Ints, label: Floats, context_ptr: Longs, context_row: Ints, rating: Floats, gap: Ints,
    row_start: Longs, user_ptr: Longs, rows: Floats, private: Floats, flats: Floats, my_rows: Floats,
    my_private: Floats, my_flats: Floats,
) -> None:  # fmt: skip
    """All steps of pFedMe of clients first..last-1: `inner` plain ones of the personal model, which the other follows.

    `rows`, `private` and `flats` are what is leaned on, my_* the personal models, which begin as the same.
    """
    d_flat, d = np.empty(flats.shape[1], np.float32), rows.shape[1]
    for c in range(first, last):
        a, b = row_start[c], row_start[c + 1]
        mine, flat = my_rows[a:b], my_flats[c]
        people = slice(user_ptr[c], user_ptr[c + 1])
        users, d_users = my_private[people], np.empty_like(my_private[people])
        d_rows = np.empty_like(mine)
        for epoch in range(len(order)):
            for k in range(batch_ptr[c], batch_ptr[c + 1]):
                some = order[epoch, batch_start[epoch, k] : batch_start[epoch, k + 1]]
                person = np.empty(len(some), np.int64)
                who = _find_users(some, owner, person)
                p, h = np.empty((len(who), d), np.float32), np.empty((len(who), d), np.float32)
                for _ in range(inner):
                    used, wanted, item = _gather_samples(some, row_of, label, mine)
                    ptr, read, events, bucket = _gather_events(
                        at, g, who, context_ptr, context_row, rating, gap, mine, flat
                    )  # fmt: skip
                    x, kept = np.empty((len(events), d), np.float32), np.empty((len(events), 5 * d), np.float32)
                    for u in range(len(who)):
                        p[u] = my_private[who[u]]
                    compute_states(flat, at, g, ptr, events, h, x, kept)
                    dp, dh, d_item = _tower_slopes(
                        flat, at, layers, biases, sizes, mu, p, h, person, item, wanted, d_flat
                    )  # fmt: skip
                    d_events = _backprop_states(flat, at, g, ptr, events, bucket, x, kept, dh, d_flat)
                    d_users[:], d_rows[:] = 0, 0
                    for u in range(len(who)):
                        d_users[who[u] - user_ptr[c]] = dp[u]
                    for i in range(len(item)):
                        d_rows[used[i]] += d_item[i]
                    for e in range(len(events)):
                        d_rows[read[e]] += d_events[e]
                    _step_personal(flat, d_flat, flats[c], rate, lam)
                    _step_personal(mine.reshape(-1), d_rows.reshape(-1), rows[a:b].reshape(-1), rate, lam)
                    _step_personal(users.reshape(-1), d_users.reshape(-1), private[people].reshape(-1), rate, lam)
                _move_local(flats[c], flat, eta * lam)
                _move_local(rows[a:b].reshape(-1), mine.reshape(-1), eta * lam)
                _move_local(private[people].reshape(-1), users.reshape(-1), eta * lam)
