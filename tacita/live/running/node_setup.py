"""Make a node that can join a server: its folder, its secret, and the key that the operator enrols."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tacita.core.config import validate_model
from tacita.live.node.node import Node, NodeConfig
from tacita.live.tls_certificates import check_authority, compute_key_fingerprint, make_node_key


def make_node(folder: Path, values: dict[str, Any], ca: Path) -> dict[str, str]:
    """Make a new node; returns its folder, its name, and its public key with the fingerprint to compare."""
    config = validate_model(NodeConfig, values, "the options")
    check_authority(ca)
    Node.create(folder, config, ca, also=lambda new_folder: make_node_key(new_folder / config.key))
    public = folder / f"{config.key}.pub"
    return {
        "folder": str(folder),
        "name": config.name,
        "public key": str(public),
        "fingerprint": compute_key_fingerprint(public.read_bytes()),
    }
