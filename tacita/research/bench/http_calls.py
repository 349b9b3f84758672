"""How fast `tacita serve` answers: a server in a process of its own, and clients that call one after another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np

from tacita.core.errors import TacitaError
from tacita.research.bench.timing import Report, describe_machine
from tacita.runs.run_folder import read_ids, read_result

BATCH = 100  # people of a call for many
HISTORY = 10  # items of a newcomer


@dataclass(frozen=True)
class Workload:
    """Calls of one kind, each as the bytes of a request."""

    name: str
    requests: Sequence[bytes]


@dataclass
class CallTimes:
    """What clients measured together."""

    seconds: list[float]
    failures: int = 0
    wall: float = 0.0
    processor: float = 0.0  # of the server


def bench_serving(run: Path, clients: int, seconds: float) -> Report:
    """Requests a second, and how long one takes, for each kind of call."""
    read_result(run)  # what is no finished run is refused before a server starts
    rows = []
    with start_server(run) as (process, address):
        for workload in make_workloads(run):
            asyncio.run(_call_in_turn(address, workload, clients, min(1.0, seconds)))  # the first calls warm up
            before = read_processor_seconds(process.pid)
            times = asyncio.run(_call_in_turn(address, workload, clients, seconds))
            times.processor = read_processor_seconds(process.pid) - before
            rows.append(summarise_calls(workload.name, times))
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {
        "bench": "serve",
        "run": str(run),
        "clients": clients,
        "server_mb": round(memory),
        "rows": rows,
        "machine": describe_machine(),
    }


def summarise_calls(name: str, times: CallTimes) -> Report:
    milliseconds = 1000 * np.array(times.seconds)
    if not len(milliseconds):
        raise TacitaError(f"no call of '{name}' was answered in time; measure for longer, with --seconds.")
    p50, p99 = np.percentile(milliseconds, [50, 99])
    n_calls = len(milliseconds)
    return {
        "call": name,
        "calls": n_calls,
        "failures": times.failures,
        "a_second": round(n_calls / times.wall, 1),
        "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2),
        "most_ms": round(float(milliseconds.max()), 2),
        "server_cpu_ms_each": round(1000 * times.processor / n_calls, 3),
    }


def make_workloads(run: Path) -> list[Workload]:
    """Calls about people and items of the run, the same in every measurement."""
    ids = read_ids(run)
    rng = np.random.default_rng(1)
    users = [str(user) for user in rng.permutation(ids["users"])]
    items = [str(item) for item in rng.permutation(ids["items"])]
    people = [_make_get(f"/v1/recommendations?user={quote(user, safe='')}&k=10") for user in users]
    similar = [_make_get(f"/v1/similar?item={quote(item, safe='')}&k=10") for item in items]
    batches = []
    for start in range(0, max(1, len(users) - BATCH), BATCH):
        batches.append(_make_post("/v1/recommendations", {"users": users[start : start + BATCH], "k": 10}))
    newcomers = []
    for start in range(0, max(1, len(items) - HISTORY), HISTORY):
        newcomers.append(_make_post("/v1/fold-in", {"history": items[start : start + HISTORY], "k": 10}))
    return [
        Workload("one person", people),
        Workload(f"{BATCH} people", batches),
        Workload(f"history of {HISTORY}", newcomers),
        Workload("similar items", similar),
    ]


def _make_get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


def _make_post(path: str, body: object) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


@contextlib.contextmanager
def start_server(run: Path) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """The command itself, on a free port of loopback, and where it listens."""
    command = [sys.executable, "-m", "tacita", "serve", str(run), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        yield process, _read_address(process)
    finally:
        process.terminate()
        process.communicate()


def _read_address(process: subprocess.Popen[str]) -> tuple[str, int]:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line.strip())
        match = re.search(r" at (http://[^,\s]+),", line)
        if match:
            url = urlsplit(match[1])
            return str(url.hostname), int(url.port or 0)
    sentence = lines[-1].removeprefix("tacita: ") if lines else "it said nothing."
    raise TacitaError(f"the server did not start: {sentence}")


def read_processor_seconds(pid: int) -> float:
    """What a process has used of the processor so far; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    ticks = int(fields[11]) + int(fields[12])
    return ticks / 100


async def _call_in_turn(address: tuple[str, int], workload: Workload, clients: int, seconds: float) -> CallTimes:
    """Every client sends its next call when the last one was answered."""
    times = CallTimes([])
    began = time.perf_counter()
    end = began + seconds
    calls = [_call_until(address, workload.requests, client, clients, end, times) for client in range(clients)]
    await asyncio.gather(*calls)
    times.wall = time.perf_counter() - began
    return times


async def _call_until(
    address: tuple[str, int], requests: Sequence[bytes], first: int, step: int, end: float, times: CallTimes
) -> None:
    reader, writer = await asyncio.open_connection(*address)
    place = first
    try:
        while time.perf_counter() < end:
            began = time.perf_counter()
            writer.write(requests[place % len(requests)])
            status = await _read_answer(reader)
            times.seconds.append(time.perf_counter() - began)
            times.failures += status != 200
            place += step
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read_answer(reader: asyncio.StreamReader) -> int:
    """Read one answer to its end; its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None
    await reader.readexactly(int(length[1]))
    return int(head.split(b" ", 2)[1])
