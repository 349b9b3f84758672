"""What travels down to ranks: the server's model, what is sent to all, lists for single clients; and questions.

Where lists are written when devices ask for them, ranks get what the parts keep on the server, and write them as the
server would. So ranks are trusted like the server.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tacita.core.files import flatten_parts, nest_parts
from tacita.core.types import Arrays, Broadcast, Keys, Ragged, RoundReplay, ServerState
from tacita.federation.ranks.rank_messages import Fields, select_below
from tacita.messages import Spec
from tacita.round.broadcast import PerClientLists
from tacita.round.plan import Federation
from tacita.round.question import Question


def encode_model(server: ServerState, with_parts: bool = False) -> tuple[Fields, Arrays]:
    """What devices may see of the server's state; with parts also what those keep there."""
    arrays: Arrays = {"server/items": server.items}
    for name, head in server.heads.items():
        arrays[f"server/heads/{name}"] = head
    fields: Fields = {"block": server.block, "round": server.round, "heads": list(server.heads), "parts": []}
    if with_parts:
        fields["parts"] = list(server.parts)
        arrays |= flatten_parts(server.parts, "server/parts/")
    return fields, arrays


def decode_model(fields: Fields, arrays: Arrays) -> ServerState:
    heads = {name: arrays[f"server/heads/{name}"] for name in fields["heads"]}
    parts: dict[str, Arrays] = {name: {} for name in fields["parts"]}
    parts |= nest_parts(arrays, "server/parts/")
    return ServerState(arrays["server/items"], heads, fields["block"], fields["round"], parts)


def encode_down(
    federation: Federation, server: ServerState, broadcast: Broadcast, chosen: Keys | None = None
) -> tuple[Fields, Arrays]:
    """The model and a broadcast; `chosen`: the clients that lists are written to."""
    writes_on_demand = federation.identifies_clients and broadcast.per_client_items is not None
    fields, arrays = encode_model(server, with_parts=writes_on_demand)
    fields["common"] = list(broadcast.common)
    fields["writes_on_demand"] = writes_on_demand
    fields["lists"] = {}
    arrays |= flatten_parts(broadcast.common, "common/")
    if writes_on_demand or chosen is None:
        return fields, arrays
    arrays["clients"] = chosen
    for name, lists in broadcast.per_client(chosen).items():
        fields["lists"][name] = list(lists.values)
        arrays |= encode_lists(lists, f"lists/{name}/")
    return fields, arrays


def decode_down(federation: Federation, fields: Fields, arrays: Arrays) -> tuple[ServerState, Broadcast]:
    server = decode_model(fields, arrays)
    if fields["writes_on_demand"]:
        return server, federation.broadcast_serving(server)
    common: dict[str, Arrays] = {name: {} for name in fields["common"]}
    common |= nest_parts(arrays, "common/")
    if not fields["lists"]:
        return server, Broadcast(common)
    lists = {name: decode_lists(arrays, f"lists/{name}/") for name in fields["lists"]}
    select = PerClientLists(arrays["clients"], lists).select_lists
    return server, Broadcast(common, select, decode_lists=federation.decode_lists)


def encode_lists(lists: Ragged, prefix: str) -> Arrays:
    arrays: Arrays = {f"{prefix}ptr": lists.ptr, f"{prefix}ids": lists.ids}
    for name, column in lists.values.items():
        arrays[f"{prefix}values/{name}"] = column
    return arrays


def decode_lists(arrays: Arrays, prefix: str) -> Ragged:
    return Ragged(arrays[f"{prefix}ptr"], arrays[f"{prefix}ids"], select_below(arrays, f"{prefix}values/"))


def encode_question(question: Question) -> Fields:
    return asdict(question)


def decode_question(fields: Fields) -> Question:
    replay = None if fields["replay"] is None else RoundReplay(**fields["replay"])
    serial = None if fields["serial"] is None else (int(fields["serial"][0]), int(fields["serial"][1]))
    return Question(fields["kind"], fields["owner"], replay, serial)


def encode_specs(specs: tuple[Spec, ...]) -> list[Fields]:
    return [asdict(spec) for spec in specs]


def decode_specs(specs: list[dict[str, Any]]) -> tuple[Spec, ...]:
    return tuple(Spec(**{**spec, "shape": tuple(spec["shape"])}) for spec in specs)
