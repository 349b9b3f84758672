"""Small federations under private parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from helpers.oracle import federate, make_backbone, make_block, make_stream
from tacita.core.types import BlockStream
from tacita.methods import RunContext, build_parts
from tacita.methods.personal.dpps import DPPS
from tacita.round.clashes import check_parts
from tacita.round.plan import Federation
from tacita.round.question import Question

ROUND = Question("round")
SMALL_DATA = "synthetic:users=90,items=60,per_user=14,groups=4"


def crowd_stream(n_users: int = 30, n_items: int = 40, blocks: int = 1) -> BlockStream:
    rng = np.random.default_rng(5)

    def block(index: int) -> Any:
        own_values = [rng.choice(n_items, 6, replace=False).tolist() for _ in range(n_users)]
        known = n_users if index else 0
        return make_block(
            index,
            n_items,
            [m[:4] for m in own_values],
            [m[4:5] for m in own_values],
            [m[5:] for m in own_values],
            known,
        )

    return make_stream(*[block(k) for k in range(blocks)])


def federate_parts(
    *specs: dict[str, Any], stream: BlockStream | None = None, backbone: str = "mf", **train: Any
) -> Federation:
    stream = stream or crowd_stream()
    if train.get("aggregation") == "fixed":  # everybody of the stream is enrolled
        rate = train.get("participation", {}).get("rate", 1.0)
        train.setdefault("denominator", rate * stream.n_users)
    fed = federate(stream, make_backbone(backbone), **{"rounds": 3, "batch_size": 8} | train)
    parts = build_parts(list(specs), RunContext(fed.backbone, fed.draws, fed.config.train))
    result = replace(fed, parts=parts)
    result.learner.check()
    check_parts(parts, fed.config.train, 40)
    return result


def dpps_part(fed: Federation) -> DPPS:
    (part,) = (entry for entry in fed.parts if isinstance(entry, DPPS))
    return part


def serving_broadcast(fed: Federation, progress: Any) -> Any:
    return fed.broadcast_serving(progress.server)
