"""The verbs of benchmarks: a round, growth with the number of users, evaluation, the cost of a promise, HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacita.cli import console, result_tables
from tacita.cli.options import AsJson, DataDir, Imports, RunArgument, RunOption, Threads, choose_run, import_modules
from tacita.core.errors import TacitaError

if TYPE_CHECKING:
    from tacita.research.bench.rank_rounds import RankBenchSpec
    from tacita.runs.assembly import Machine

app = typer.Typer(no_args_is_help=True, help="Speed and memory, as ratios in one run.")

Data = Annotated[str, typer.Option(help="Dataset name, file, or synthetic:...")]
Repeats = Annotated[int, typer.Option(min=1, help="How often to measure; the median counts.")]


@app.command("rounds")
def bench_rounds(
    data: Data = "ml-100k",
    backbone: Annotated[
        str | None, typer.Option(help="mf (default), ncf or pfedrec; with --method neumf, neuncf or mf.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="A method that sends predictions (fedkdrec, ptf-fedrec), or a variant of FedShare."),
    ] = None,
    repeats: Repeats = 5,
    against: Annotated[
        Path | None,
        typer.Option(help="Another checkout of tacita: time its rounds and these in turns, instead of the naive loop."),
    ] = None,
    imports: Imports = None,
    data_dir: DataDir = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """One round of block 0: the naive per-client loop against the fast path. Takes about half a minute.

    `--against` takes ten rounds of each side per repeat and prints lower quartiles; the ratio is new over old.

    `--method` times a round of prediction transfer, the server's agents apart, on a leave-one-out split, or one of
    FedShare, what devices do of it apart, on a random split.

    Examples: `tacita bench rounds --data ml-100k --backbone mf --json`,
    `tacita bench rounds --against ../older --json`, `tacita bench rounds --method fedkdrec --data ml-1m --repeats 1`
    """
    from tacita.core.config import RunConfig
    from tacita.research.bench import harness
    from tacita.runs import assembly

    import_modules(imports)
    machine = assembly.Machine(threads, data_dir=data_dir)
    if method is not None:
        if against is not None:
            raise TacitaError("--against times rounds of the default method; leave out --method.")
        _bench_method(data, backbone, method, repeats, machine, as_json)
        return
    backbone = backbone or "mf"
    if against is not None:
        spec = harness.BenchmarkSpec(data, backbone, threads, data_dir)
        with console.show_clock("timing rounds of both checkouts", quiet=as_json):
            result = harness.compare_rounds(against, spec, repeats)
        result_tables.show_bench(result, as_json)
        return
    with console.show_clock("timing the fast round and the naive loop", quiet=as_json):
        config = RunConfig(data=data, backbone={"name": backbone})
        federation = assembly.assemble_federation(config, machine)
        result = harness.bench_rounds(federation, repeats)
    result_tables.show_bench(result, as_json)


def _bench_method(data: str, backbone: str | None, method: str, repeats: int, machine: Machine, as_json: bool) -> None:
    from tacita.research.bench.score_rounds import bench_scores
    from tacita.research.bench.shared_graph import bench_sharing
    from tacita.round.registry import list_preset_parts, resolve_config
    from tacita.runs.assembly import assemble_federation

    shares = any(part["name"] == "sharing" for part in list_preset_parts(method))
    split = "random" if shares else "leave-one-out"
    bench = bench_sharing if shares else bench_scores
    values: dict[str, Any] = {"data": data, "method": method, "split": {"kind": split}}
    if backbone is not None:
        values["backbone"] = {"name": backbone}
    with console.show_clock("timing the fast round and the naive loop", quiet=as_json):
        federation = assemble_federation(resolve_config(values, "the command line"), machine)
        if not shares and federation.learner.name != "scores":
            raise TacitaError(
                f"--method {method} has no naive loop; use fedkdrec, ptf-fedrec or fedshare, or leave it out."
            )
        result = bench(federation, repeats)
    result_tables.show_bench(result, as_json)


@app.command("scale")
def bench_scale(
    users: Annotated[str, typer.Option(help="Numbers of users, comma-separated.")] = "10000,100000,1000000",
    items: Annotated[int, typer.Option(min=2, help="Size of the catalogue.")] = 100_000,
    per_user: Annotated[int, typer.Option(min=1, help="Interactions of each user.")] = 20,
    participants: Annotated[int, typer.Option(min=1, help="Clients in each round.")] = 10_000,
    repeats: Repeats = 5,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Training rounds with a fixed number of participants while the users grow: time and peak memory.

    Example: `tacita bench scale --json`
    """
    from tacita.research.bench import harness
    from tacita.runs import assembly

    try:
        sizes = tuple(sorted(int(n) for n in users.split(",")))
    except ValueError:
        raise TacitaError(f"--users '{users}' is not a list of numbers such as 10000,100000.") from None
    if not sizes or sizes[0] < 2:
        raise TacitaError("--users needs numbers from 2.")
    assembly.use_threads(threads)
    with console.show_progress("sizes", quiet=as_json) as tell:
        tell(0, len(sizes))

        def on_size(n_users: int) -> None:
            tell(sizes.index(n_users) + 1, len(sizes))

        result = harness.bench_scale(sizes, items, per_user, participants, repeats, on_size)
    result_tables.show_bench(result, as_json)


@app.command("ranks")
def bench_ranks(
    data: Data = "ml-1m",
    backbone: Annotated[str, typer.Option(help="mf, neumf, ...")] = "mf",
    users: Annotated[int, typer.Option(min=0, help="Synthetic people instead of a dataset; 0: the dataset.")] = 0,
    items: Annotated[int, typer.Option(min=2, help="Items of synthetic people.")] = 100_000,
    participants: Annotated[int, typer.Option(min=1, help="Of synthetic people, in each round.")] = 10_000,
    ranks: Annotated[int, typer.Option(min=2, help="Processes, of one thread each.")] = 2,
    repeats: Repeats = 5,
    data_dir: DataDir = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """A round on several ranks of one thread, in turns with one process that has one thread, or all.

    Examples: `tacita bench ranks --data ml-1m --backbone neumf --json`, `tacita bench ranks --users 1000000 --json`
    """
    from tacita.kernels.threads import max_threads
    from tacita.research.bench import rank_rounds
    from tacita.runs import assembly
    from tacita.runs import ranks as rank_processes

    machine = assembly.Machine(1, data_dir=data_dir)
    spec = rank_rounds.RankBenchSpec(data, backbone, users, participants, items)
    if rank_processes.is_service_rank():
        rank_processes.serve_run(machine, None, lambda own: rank_rounds.make_bench_federation(spec, own))
        return
    rank_processes.check_ranks(ranks)
    arguments = _list_rank_arguments(spec)
    if data_dir is not None:
        arguments += ["--data-dir", str(data_dir)]
    all_threads = threads or max_threads()
    with (
        console.show_clock("timing rounds on one rank and on several", quiet=as_json),
        rank_processes.open_ranks(ranks, None, machine, arguments) as led_machine,
    ):
        result = rank_rounds.bench_ranks(spec, led_machine, all_threads, repeats)
    result_tables.show_bench(result, as_json)


def _list_rank_arguments(spec: RankBenchSpec) -> list[str]:
    """What a further rank of a benchmark is started with."""
    return [
        *("bench", "ranks", "--data", spec.data, "--backbone", spec.backbone),
        *("--users", str(spec.users), "--items", str(spec.items), "--participants", str(spec.participants)),
    ]


@app.command("cost")
def bench_cost(repeats: Repeats = 5, as_json: AsJson = False) -> None:
    """A cost model of rounds, fitted on measured points: computing on one thread, exchange of two ranks, evaluation.

    It is tried on other points than those it was fitted on, and says what larger runs would take. Some three minutes.

    Example: `tacita bench cost --json`
    """
    from tacita.kernels.threads import limit_library_threads, set_threads
    from tacita.research.bench import cost_model
    from tacita.research.bench.rank_rounds import EXCHANGED_SIZES, RankBenchSpec, measure_exchange
    from tacita.runs.assembly import Machine
    from tacita.runs.ranks import open_ranks

    exchanges = []
    with console.show_progress("exchanges", quiet=as_json) as tell:
        for number, (items, participants) in enumerate(EXCHANGED_SIZES):
            spec = RankBenchSpec("ml-1m", "mf", 20_000, participants, items)
            with open_ranks(2, None, Machine(1), _list_rank_arguments(spec)) as machine:
                seconds = measure_exchange(spec, machine, repeats)
            exchanges.append((cost_model.RoundSize(spec.users, items, participants), seconds))
            tell(number + 1, len(EXCHANGED_SIZES))
    set_threads(1)
    with console.show_progress("points", quiet=as_json) as tell, limit_library_threads(1):
        result = cost_model.bench_costs(exchanges, repeats, tell)
    result_tables.show_bench(result, as_json)


@app.command("evaluate")
def bench_evaluate(
    data: Data = "ml-1m",
    data_dir: DataDir = None,
    threads: Threads = 0,
    repeats: Repeats = 5,
    as_json: AsJson = False,
) -> None:
    """Full-ranking evaluation of every user of a dataset (random 8:1:1), three metrics.

    Example: `tacita bench evaluate --data ml-1m --json`
    """
    from tacita.core.config import RunConfig, SplitConfig
    from tacita.research.bench import harness
    from tacita.runs import assembly

    with console.show_clock("timing evaluation", quiet=as_json):
        config = RunConfig(data=data, split=SplitConfig(kind="random"))
        federation = assembly.assemble_federation(config, assembly.Machine(threads, data_dir=data_dir))
        result = harness.bench_evaluate(federation, repeats)
    result_tables.show_bench(result, as_json)


@app.command("noise")
def bench_noise(
    data: Data = "ml-100k",
    method: Annotated[str, typer.Option(help="A method whose rounds have noise: dpps or dp-fedavg.")] = "dpps",
    backbone: Annotated[str, typer.Option(help="mf, ncf, ...; tally: its exchange, without solving.")] = "mf",
    epsilon: Annotated[float, typer.Option(min=0.01, help="tally's budget; it changes no step of the work.")] = 4.0,
    repeats: Repeats = 15,
    data_dir: DataDir = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """A private round against the plain one, in turns, everybody in both, random split; of tally what people tell.

    The processor's time is the ratio to look at where other work runs beside it.

    Examples: `tacita bench noise --json`, `tacita bench noise --backbone tally --data ml-1m --repeats 5`
    """
    from tacita.research.bench.private_rounds import bench_exchange, bench_noise
    from tacita.round.registry import resolve_config
    from tacita.runs.assembly import Machine, assemble_federation

    is_tally = backbone == "tally"
    values: dict[str, Any] = {"data": data, "backbone": {"name": backbone}, "split": {"kind": "random"}}
    noise: dict[str, Any] = {"privacy": {"epsilon": epsilon}} if is_tally else {"method": method}
    if method == "dp-fedavg":
        values["train"] = {"aggregation": "fixed"}
        noise["train"] = {"aggregation": "fixed", "participation": {"kind": "poisson", "rate": 1.0}}
    bench = bench_exchange if is_tally else bench_noise
    with console.show_clock("timing rounds with and without noise", quiet=as_json):
        machine = Machine(threads, data_dir=data_dir)
        plain = assemble_federation(resolve_config(values, "the command line"), machine)
        private = assemble_federation(resolve_config({**values, **noise}, "the command line"), machine)
        result = bench(plain, private, repeats)
    result_tables.show_bench(result, as_json)


@app.command("peers")
def bench_peers(
    data: Data = "ml-100k", data_dir: DataDir = None, threads: Threads = 0, as_json: AsJson = False
) -> None:
    """A run with nothing set beside implicit's ALS, tuned on validation over eight settings: time, memory, NDCG@10.

    Both have the same split and rank the whole catalogue. Needs the extra `peers`.

    Example: `tacita bench peers --data clicks.csv`
    """
    from tacita.research.bench import peers

    with console.show_clock("training both", quiet=as_json):
        result = peers.bench_peers(data, threads, data_dir)
    result_tables.show_bench(result, as_json)


@app.command("epoch")
def bench_epoch(
    data: Data = "ml-1m",
    method: Annotated[str, typer.Option(help="A method that trains; lipm: 50 silos, as its paper has it.")] = "lipm",
    repeats: Repeats = 3,
    data_dir: DataDir = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """A round with one local epoch over everybody's ratings of 4 and more: seconds.

    Example: `tacita bench epoch --data ml-1m --json`
    """
    from tacita.research.bench.private_rounds import bench_epoch
    from tacita.round.registry import resolve_config
    from tacita.runs.assembly import Machine, assemble_federation

    split = {"kind": "random", "min_rating": 4.0}
    values: dict[str, Any] = {"data": data, "method": method, "split": split, "train": {"local_epochs": 1}}
    with console.show_clock("timing a local epoch", quiet=as_json):
        config = resolve_config(values, "the command line")
        federation = assemble_federation(config, Machine(threads, data_dir=data_dir))
        result = bench_epoch(federation, repeats)
    result_tables.show_bench(result, as_json)


@app.command("serve")
def bench_serve(
    folder: RunArgument = None,
    named: RunOption = None,
    clients: Annotated[int, typer.Option("--clients", min=1, max=256, help="Who call at the same time.")] = 8,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=600, help="For each kind of call.")] = 10.0,
    as_json: AsJson = False,
) -> None:
    """The verb serve on loopback, called by several clients at once: requests a second, median and 99th percentile.

    The clients share the machine with the server, and take some of its time.

    Example: `tacita bench serve runs/first --clients 8 --json`
    """
    from tacita.cli.serve import check_installed
    from tacita.research.bench.http_calls import bench_serving

    run = choose_run(folder, named, "tacita bench serve runs/first")
    check_installed()
    with console.show_clock("calling the server", quiet=as_json):
        result = bench_serving(run, clients, seconds)
    result_tables.show_bench(result, as_json)
