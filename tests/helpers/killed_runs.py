"""A script that trains a run in processes which are killed."""

from __future__ import annotations

KILL_SCRIPT = """
import json, math, os, random, shutil, signal, sys, time
from pathlib import Path

from tacita.core import files
from tacita.runs import training
from tacita.core.config import RunConfig, validate_model

training.CHECKPOINT_SECONDS, training.CHECKPOINT_SHARE = 0.0, math.inf
config = validate_model(RunConfig, json.loads(sys.argv[1]), "the test")
rng = random.Random(int(sys.argv[2]))
until = time.monotonic() + float(sys.argv[3])
count = 0


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def deadly(real, last):
    # The call number `last` of all patched ones is the end: before it, after it, or in the middle of a write.
    def call(*args, **named):
        global count
        count += 1
        if count != last:
            return real(*args, **named)
        way = rng.randrange(3)
        if way == 0:
            die()
        if way == 1 and real is write:
            args[0]._file.write(b'{"block": 0, "rou')
            die()
        real(*args, **named)
        die()

    return call


write, fsync, replace, rename, unlink = files.JsonLinesWriter.add, os.fsync, os.replace, Path.rename, Path.unlink


def child(work, last):
    pid = os.fork()
    if pid:
        return pid
    try:
        files.JsonLinesWriter.add = deadly(write, last)
        os.fsync, os.replace = deadly(fsync, last), deadly(replace, last)
        Path.rename, Path.unlink = deadly(rename, last), deadly(unlink, last)
        work()
        Path("calls").write_text(str(count))
        os._exit(0)
    finally:
        os._exit(1)


def go_on():
    training.resume(out) if out.exists() else training.train(config, out)


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


out = Path("whole")
began = time.monotonic()
assert ended(child(go_on, 0)) == 0
took, calls = time.monotonic() - began, int(Path("calls").read_text())
whole = {name: (out / name).read_bytes() for name in ("result.json", "server.safetensors", "clients.safetensors")}
lines = len((out / "events.jsonl").read_text().splitlines())
kills = cases = 0
plan = [("write", n) for n in rng.sample(range(1, calls + 1), min(calls, 12))] + [("moment", n) for n in range(8)]
rng.shuffle(plan)
for way, n in plan:
    if cases and time.monotonic() > until:
        break
    cases += 1
    out = Path(f"killed-{cases}")
    for attempt in range(4):
        if way == "write":
            code = ended(child(go_on, n if attempt == 0 else rng.randrange(1, calls)))
        else:
            pid = child(go_on, 0)
            time.sleep(rng.random() * took)
            os.kill(pid, signal.SIGKILL)
            code = ended(pid)
        assert code in (0, -9), code
        kills += code == -9
    assert ended(child(go_on, 0)) == 0
    for name, content in whole.items():
        assert (out / name).read_bytes() == content, (way, n, name)
    assert len((out / "events.jsonl").read_text().splitlines()) == lines, (way, n)
    assert sorted(os.listdir(out)) == sorted(os.listdir("whole")), (way, n, os.listdir(out))
    shutil.rmtree(out)
print(json.dumps({"cases": cases, "kills": kills}))
"""
