"""Write a log of a million clicks with few popular items, short histories, sessions and repeats.

    python examples/skewed_log.py skewed.csv
    tacita train --data skewed.csv --out runs/skewed

40,000 users and 20,000 items of 30 topics. Popularity falls with rank, lengths of histories are lognormal, and one
click in eight goes to the successor of the item before it.
"""

from __future__ import annotations

import sys

import numpy as np

N_USERS = 40_000
N_ITEMS = 20_000
N_TOPICS = 30
NEXT_SHARE = 0.12  # clicks on the successor of the last item
POPULAR_SHARE = 0.13  # clicks on what is popular, whatever the topic
FIRST_SECOND = 1_600_000_000


def main(path: str) -> None:
    rng = np.random.default_rng(5)
    topic = rng.integers(0, N_TOPICS, N_ITEMS)
    popularity = (1 + np.arange(N_ITEMS)) ** -1.1
    rng.shuffle(popularity)
    members = [np.flatnonzero(topic == number) for number in range(N_TOPICS)]
    within_topic = [np.cumsum(popularity[items] / popularity[items].sum()) for items in members]
    overall = np.cumsum(popularity / popularity.sum())
    lengths = np.clip(np.round(np.exp(rng.normal(2.75, 0.95, N_USERS))), 3, 800).astype(int)
    tastes = rng.dirichlet(np.full(N_TOPICS, 0.12), N_USERS)
    successor = rng.permutation(N_ITEMS)
    for items in members:
        successor[items] = np.roll(items, 1)

    rows = []
    for user in range(N_USERS):
        n_clicks = lengths[user]
        topics = rng.choice(N_TOPICS, n_clicks, p=tastes[user])
        place = rng.random(n_clicks)
        kind = rng.random(n_clicks)
        start = rng.integers(0, 300 * 86_400)
        seconds = np.cumsum(rng.exponential(40_000, n_clicks)).astype(int)
        last = -1
        for click in range(n_clicks):
            if kind[click] < NEXT_SHARE and last >= 0:
                item = successor[last]
            elif kind[click] < NEXT_SHARE + POPULAR_SHARE:
                item = min(np.searchsorted(overall, place[click]), N_ITEMS - 1)
            else:
                cumulative = within_topic[topics[click]]
                position = min(np.searchsorted(cumulative, place[click]), len(cumulative) - 1)
                item = members[topics[click]][position]
            rows.append((FIRST_SECOND + start + seconds[click], user, item))
            last = item
    rows.sort(key=lambda row: row[0])
    with open(path, "w") as file:
        file.write("user,item,timestamp\n")
        file.writelines(f"{user},{item},{second}\n" for second, user, item in rows)


if __name__ == "__main__":
    main(sys.argv[1])
