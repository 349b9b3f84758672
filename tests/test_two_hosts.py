"""Two hosts: network namespaces with a cable between them, and in each the command of docs/scaling.md.

Both are in namespaces of the test's own, which need no rights and are gone with the processes in them.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 180.0  # seconds, on a busy machine
CABLE = """
set -e
mount -t tmpfs none /run
ip netns add first
ip netns add second
ip link add eth0 netns first type veth peer name eth0 netns second
ip -n first address add 10.0.0.1/24 dev eth0
ip -n second address add 10.0.0.2/24 dev eth0
for host in first second; do
    ip -n $host link set lo up
    ip -n $host link set eth0 up
done
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
TORCHRUN += ["--master-addr", "10.0.0.1", "--master-port", "29500"]
TRAIN = ["-m", "tacita", "train", "--data", "synthetic:users=60,items=40,per_user=10,seed=5", "--backbone", "mf"]
TRAIN += ["--rounds", "3", "--set", "train.aggregator=ideal", "--no-controls", "--quiet"]


def run_script(script: str) -> tuple[int, str]:
    """Exit code and errors of a shell in namespaces of its own; all that it started ends with it."""
    command = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", script]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, error = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, error


@pytest.fixture(scope="module")
def _two_hosts() -> None:
    """Skips where the system lets nobody make namespaces."""
    try:
        code, error = run_script(CABLE)
    except FileNotFoundError:
        code, error = 1, "there is no unshare"
    if code:
        reason = error.strip().splitlines() or [f"code {code}"]
        pytest.skip(f"no namespaces can be made here: {reason[-1]}")


def run_on_both(train: list[str]) -> tuple[int, str]:
    """The exit code of the first host, and what both say."""
    launch = [shlex.join(["ip", "netns", "exec", host, *TORCHRUN, "--node-rank"]) for host in ("first", "second")]
    command = shlex.join(train)
    return run_script(f"{CABLE}\n{launch[1]} 1 {command} & {launch[0]} 0 {command}; code=$?; wait; exit $code")


@pytest.mark.usefixtures("_two_hosts")
def test_two_hosts_have_the_bits_of_one_process(tmp_path: Path) -> None:
    out = tmp_path / "hosts"
    code, error = run_on_both([*TRAIN, "--rank-interface", "eth0", "--out", str(out)])
    assert code == 0, error
    ranks = json.loads((out / "result.json").read_text(encoding="utf-8"))["ranks"]
    assert (ranks["ranks"], ranks["hosts"]) == (2, 2)
    alone = tmp_path / "alone"
    subprocess.run([sys.executable, *TRAIN, "--out", str(alone)], check=True, timeout=LIMIT)
    for name in ("server.safetensors", "clients.safetensors"):
        assert (out / name).read_bytes() == (alone / name).read_bytes()
