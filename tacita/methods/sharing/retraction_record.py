"""What the server of part `retraction` keeps: participants, lengths and commitments of uploads, and checkpoints."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tacita.core.types import AnyArray, Arrays, Bools, Floats, Keys, ServerState
from tacita.messages import DenseArrays, Total
from tacita.methods.sharing import update_log as log
from tacita.methods.sharing.accumulators import COMMITMENT_SIZE

_UPLOAD_COLUMNS = ("sender", "number", "psi", "commitment")  # of every upload
_CHECKPOINT = "table."


def make_empty_record() -> Arrays:
    """Before the first round."""
    return log.make_empty_round_log() | {
        "sender": np.zeros(0, np.uint64),
        "number": np.zeros(0, np.int32),
        "psi": np.zeros(0, np.float64),
        "commitment": np.zeros((0, COMMITMENT_SIZE), np.uint16),
        "damping": np.zeros(1),
        "waiting": np.zeros(0, np.uint64),
        "mean-weight": np.zeros(1),
    }


# Uploads


def record_uploads(state: Arrays, number: int, total: Total, name: str) -> Arrays:
    """The record with the lengths and commitments of one round's uploads."""
    lengths = total.each.get(f"{name}.psi")
    if lengths is None:
        return state
    commitment_field = total.each[f"{name}.commitment"]
    commitments = commitment_field.value
    assert isinstance(lengths.value, DenseArrays)
    assert isinstance(commitments, DenseArrays)
    order = np.argsort(lengths.sender)  # so that the list does not depend on where users live
    values = lengths.value.value
    psi = values[order, 0]
    digest = commitments.value[order]
    new: Arrays = {
        "sender": lengths.sender[order],
        "number": np.full(len(order), number, np.int32),
        "psi": psi.astype(np.float64),
        "commitment": digest.astype(np.uint16),
    }
    updated = dict(state)
    for column in _UPLOAD_COLUMNS:
        earlier = state[column]
        added = new[column]
        updated[column] = np.concatenate([earlier, added])
    n_clients = max(1, total.n_clients)
    mean_weight = total.weight / n_clients
    updated["mean-weight"] = np.array([mean_weight])
    return updated


def sum_upload_lengths(state: Arrays, leavers: Keys, before: int | None = None) -> float:
    """How long all uploads of some users together can be; `before`: only those of the first rounds."""
    is_counted = np.isin(state["sender"], leavers)
    if before is not None:
        is_counted &= state["number"] < before
    counted = state["psi"][is_counted]
    return float(counted.sum())


def _select_uploads(state: Arrays, stays: Bools) -> Arrays:
    return {column: state[column][stays] for column in _UPLOAD_COLUMNS}


# Checkpoints


def _count_rounds(state: Arrays) -> int:
    return len(state["damping"]) - 1


def make_checkpoint(state: Arrays, server: ServerState) -> Arrays:
    """The model after the recorded rounds."""
    rounds = _count_rounds(state)
    key = f"{_CHECKPOINT}{rounds:06d}"
    items: Floats = server.items
    checkpoint: Arrays = {key: items}
    for name, head in server.heads.items():
        checkpoint[f"{key}.{name}"] = head
    return checkpoint


def list_checkpoints(state: Arrays) -> list[int]:
    """After how many rounds there is a checkpoint."""
    rounds = {_parse_checkpoint_round(name) for name in state if name.startswith(_CHECKPOINT)}
    return sorted(rounds)


def _parse_checkpoint_round(name: str) -> int:
    return int(name.split(".")[1])


def find_checkpoint(state: Arrays, leavers: Keys, most_psi: float) -> int | None:
    """The last checkpoint that holds little enough of some users; None: there is none."""
    for rounds in reversed(list_checkpoints(state)):
        if sum_upload_lengths(state, leavers, rounds) <= most_psi:
            return rounds
    return None


def has_rounds_of_other_blocks(state: Arrays, checkpoint: int, block: int) -> bool:
    """Whether some round after a checkpoint is not of this block."""
    rounds = state["rounds"]
    blocks = rounds[checkpoint:, 0]
    return bool((blocks != block).any())


def restore_checkpoint(server: ServerState, state: Arrays, rounds: int) -> ServerState:
    """The server with the model of a checkpoint."""
    key = f"{_CHECKPOINT}{rounds:06d}"
    heads = {}
    for name in server.heads:
        heads[name] = state[f"{key}.{name}"]
    items = state[key]
    return replace(server, items=items, heads=heads)


def _drop_later_checkpoints(state: Arrays, last: int) -> Arrays:
    remaining: dict[str, AnyArray] = {}
    for name, array in state.items():
        is_later = name.startswith(_CHECKPOINT) and _parse_checkpoint_round(name) > last
        if not is_later:
            remaining[name] = array
    return remaining


# Leaving


def drop_leavers(state: Arrays, leavers: Keys, server: ServerState) -> Arrays:
    """The record of the others. The table as it is becomes a checkpoint, and none that holds a leaver stays."""
    is_leaver = np.isin(state["sender"], leavers)
    n_rounds = len(state["rounds"])
    numbers = state["number"][is_leaver]
    first_round = int(numbers.min(initial=n_rounds))
    remaining = log.drop_clients(state, leavers)
    remaining |= _select_uploads(state, ~is_leaver)
    remaining = _drop_later_checkpoints(remaining, first_round)
    return remaining | make_checkpoint(remaining, server)


def truncate_and_drop_leavers(state: Arrays, leavers: Keys, rounds: int) -> Arrays:
    """The record as it was after some rounds, without the leavers."""
    is_leaver = np.isin(state["sender"], leavers)
    is_early = state["number"] < rounds
    remaining = log.drop_clients(state, leavers)
    is_remaining = ~is_leaver & is_early
    remaining |= _select_uploads(state, is_remaining)
    n_ends = rounds + 1
    ptr = remaining["ptr"][:n_ends]
    n_clients = ptr[-1]
    kept_rounds = remaining["rounds"]
    remaining["rounds"] = kept_rounds[:rounds]
    remaining["ptr"] = ptr
    n_damping = rounds + 1
    remaining["damping"] = state["damping"][:n_damping]
    clients = remaining["clients"]
    remaining["clients"] = clients[:n_clients]
    return _drop_later_checkpoints(remaining, rounds)
