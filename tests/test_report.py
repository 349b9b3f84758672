"""The report says every number of the run, escapes every name, and refuses what it cannot read."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
from jinja2 import UndefinedError

from tacita.core.errors import TacitaError
from tacita.metrics import compute_confidence_interval
from tacita.report import charts
from tacita.report.charts import Dot, Segment, Series, SeriesStyle
from tacita.report.data import read_run
from tacita.report.drawing import COLOURS
from tacita.report.elements import Figure, PageTable, TableCell
from tacita.report.pages import render, write_report
from tacita.report.seeds import escape_latex, group_seeds, make_rows, read_groups, render_csv, render_latex
from tacita.runs.comparison import compare

EVIL = '<script>alert("x")</script>&\'$\\frac{\ud800'
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Balance(HTMLParser):
    """Every element that opens closes, in order; collects tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def scores(value: float) -> dict[str, float]:
    return {"ndcg@20": value, "recall@20": 2 * value + 0.0003}


def block(n: int) -> dict[str, Any]:
    own_values = 0.2571 - 0.0413 * n
    return {
        "block": n,
        **scores(own_values),
        "rounds": 10 - n,
        "best_round": 7 - n,
        "valid": 0.2101 + 0.01 * n,
        "users": 1297 - n,
        "new": {"users": 97 if n == 0 else 12 + n, **scores(own_values + 0.0107)},
        "returning": {"users": 0 if n == 0 else 85 + n, **scores(own_values - 0.0119 if n else 0.0)},
        "mask_history": scores(own_values + 0.0533),
        "bytes_up": 7643.9 + 1000 * n,
        "bytes_down": 25600.0,
        "on_blocks": [own_values if s == n else 0.2003 - 0.0101 * s - 0.0021 * n for s in range(n + 1)],
    }


def control(level: float, blocks: int) -> dict[str, Any]:
    each = [scores(level + 0.0011 * n) for n in range(blocks)]
    return {"blocks": each, "mean": scores(level + 0.0007)}


def result(blocks: int = 4) -> dict[str, Any]:
    return {
        "tacita": "0.1.0",
        "config": {
            "data": "toy",
            "backbone": {"name": "mf"},
            "method": "fedavg",
            "parts": None,
            "seed": 7,
            "evaluate": {"select_by": "ndcg@20", "mask": "block", "sampled_negatives": 0},
        },
        "data": {"name": "toy", "fingerprint": "efce3de6", "users": 1300, "items": 1200},
        "blocks": [block(n) for n in range(blocks)],
        "mean": scores(0.1744),
        "continual": {"la": 0.1953, "ra": 0.1867, "hm": 0.1909},
        "controls": {
            "random": control(0.0411, blocks),
            "popular": control(0.1021, blocks),
            "alone": control(0.0231, blocks),
            "linear": {"skipped": "more than 20,000 items"},
        },
        "bytes": {"up_per_client_and_round": 9143.9, "down_per_client_and_round": 25600.0},
    }


def make(folder: Path, run: dict[str, Any] | None = None) -> Path:
    run = run or result()
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(run))
    (folder / "config.toml").write_text(f'data = "toy"\nseed = {run["config"]["seed"]}\n')
    events = [
        {"block": b["block"], "round": r, "clients": 9, "bytes_up": 1.0, "bytes_down": 2.0, "valid": 0.01 * r + 0.1}
        for b in run["blocks"]
        for r in range(1, b["rounds"] + 1)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps({**e, "seconds": 0.1}) + "\n" for e in events))
    return folder


def read(folders: list[Path], out: Path) -> tuple[str, Balance]:
    """The page, checked to be well-formed, to load nothing and to run nothing."""
    write_report(folders, out)
    page = out.read_text(encoding="utf-8")
    balance = Balance()
    balance.feed(page)
    balance.close()
    assert balance.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(balance.tags)
    assert not {name for name, _ in balance.attributes if name.startswith("on") or name in ("href", "src")}
    assert "nan" not in balance.text.lower()
    assert "url(" not in page
    return page, balance


def test_every_number_is_on_the_page(tmp_path: Path) -> None:
    run = result()
    _, observations = read([make(tmp_path / "x", run)], tmp_path / "report.html")
    wanted = [*run["mean"].values(), *run["continual"].values()]
    for entry in run["blocks"]:
        wanted += [entry["ndcg@20"], entry["recall@20"], entry["valid"], *entry["mask_history"].values()]
        wanted += [entry[g]["ndcg@20"] for g in ("new", "returning") if entry[g]["users"]]
    for name in ("random", "popular", "alone"):
        wanted += [v for b in run["controls"][name]["blocks"] for v in b.values()]
        wanted += run["controls"][name]["mean"].values()
    missing = [v for v in wanted if f"{v:.4f}" not in observations.text]
    assert not missing
    for t in run["blocks"]:
        assert all(f"{v:.3f}" in observations.text for v in t["on_blocks"])
    for text in ("fedavg on toy", "seed 7", "7.6 kB", "25.6 kB", "9.1 kB", "1,300 users", "1,200 items", "efce3de6"):
        assert text in observations.text
    assert "no federation" in observations.text
    assert "centralised linear (more than 20,000 items)" in observations.text
    assert "seed = 7" in observations.text
    assert "No control is better" in observations.text
    assert observations.tags.count("figure") == 4


def test_pictures_have_a_text_for_those_who_do_not_see_them(tmp_path: Path) -> None:
    _, observations = read([make(tmp_path / "x")], tmp_path / "report.html")
    labels = [value for name, value in observations.attributes if name == "aria-label"]
    assert any(value and "most popular: 0.1021" in value for value in labels)
    assert observations.attributes.count(("role", "img")) == observations.tags.count("figcaption")


def test_empty_group_is_shown_as_a_dash(tmp_path: Path) -> None:
    _, observations = read([make(tmp_path / "x")], tmp_path / "report.html")
    assert "– (0)" in observations.text
    assert "0.0000" not in observations.text


@pytest.mark.parametrize(("key", "kind"), [("popular", "bad"), ("alone", "bad"), ("linear", "note")])
def test_a_method_below_a_control_is_shown_to_be(tmp_path: Path, key: str, kind: str) -> None:
    run = result()
    run["controls"][key] = control(0.3001, 4)
    page, observations = read([make(tmp_path / "x", run)], tmp_path / "report.html")
    name = {"popular": "most popular", "alone": "no federation", "linear": "centralised linear"}[key]
    assert f'<p class="{kind}">Below {name}' in page
    assert "0.3008 against 0.1744" in observations.text
    assert "No control is better" not in observations.text
    assert "▲ 0.3001" in observations.text


def test_block_below_its_control_is_reported_despite_a_better_mean(tmp_path: Path) -> None:
    run = result()
    run["controls"]["popular"]["blocks"][3] = scores(0.9)
    _, observations = read([make(tmp_path / "x", run)], tmp_path / "report.html")
    assert "Not below most popular on the mean, but below it in block 3." in observations.text


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    run = result()
    run["data"] |= {"name": EVIL, "fingerprint": EVIL}
    run["config"] |= {"method": EVIL, "backbone": {"name": EVIL}}
    run["controls"]["linear"]["skipped"] = EVIL
    run["controls"][EVIL] = control(0.5, 4)
    first, two = make(tmp_path / "x", run), make(tmp_path / "y<b>", run)
    for folders in ([first], [first, two]):
        page, _ = read(folders, tmp_path / "report.html")  # finds no script, no handler
        assert "<script" not in page
        assert "&lt;script&gt;" in page
    write_report([first], tmp_path / "x.svg")
    assert "<script" not in (tmp_path / "x.svg").read_text()


def test_many_runs_are_compared(tmp_path: Path) -> None:
    folders = []
    for n in range(20):
        run = result()
        run["config"]["seed"] = n
        run["config"]["method"] = "fedavg" if n % 2 else "f3crec"
        run["mean"] = scores(0.15 + 0.0013 * n)
        folders.append(make(tmp_path / f"run-{n}", run))
    _, observations = read(folders, tmp_path / "report.html")
    assert "20 runs compared" in observations.text
    assert all(f"{0.15 + 0.0013 * n:.4f}" in observations.text and f"run-{n}" in observations.text for n in range(20))
    assert "The best 16 of 20 runs" in observations.text
    assert "Over seeds" in observations.text
    assert "compare only those" not in observations.text


def test_runs_that_cannot_be_compared_are_said_to_be(tmp_path: Path) -> None:
    other = result(2)
    other["data"]["fingerprint"] = "another"
    other["mean"] = {"hr@10": 0.4321}
    folders = [make(tmp_path / "x"), make(tmp_path / "y", other)]
    _, observations = read(folders, tmp_path / "report.html")
    assert "compare only those that agree" in observations.text
    assert "no metric in common" in observations.text
    assert "0.4321" in observations.text


def test_one_block_and_no_controls(tmp_path: Path) -> None:
    bare = result(1)
    bare["controls"] = {}
    first, two = make(tmp_path / "one", result(1)), make(tmp_path / "bare", bare)
    _, observations = read([first], tmp_path / "one.html")
    assert observations.tags.count("figure") == 2  # nothing to forget, and all users are new
    assert "LA, learned" not in observations.text
    assert "1 block" in observations.text
    _, observations = read([two], tmp_path / "bare.html")
    assert "No control was run" in observations.text
    assert "against most popular" not in observations.text
    read([first, two], tmp_path / "both.html")


def test_many_blocks_stay_readable(tmp_path: Path) -> None:
    page, observations = read([make(tmp_path / "x", result(60))], tmp_path / "report.html")
    assert "40 of 60 blocks are shown" in observations.text
    assert len(page) < 400_000


def test_a_run_without_validation_has_no_curve(tmp_path: Path) -> None:
    run = result()
    for entry in run["blocks"]:
        entry["valid"] = None
    folder = make(tmp_path / "x", run)
    (folder / "events.jsonl").write_text('{"block": 0, "round": 1, "valid": null}\n')
    _, observations = read([folder], tmp_path / "report.html")
    assert "over rounds" not in observations.text
    write_report([folder], tmp_path / "x.png")


def test_damaged_event_lines_are_skipped(tmp_path: Path) -> None:
    folder = make(tmp_path / "x")
    whole, _ = read([folder], tmp_path / "report.html")
    with open(folder / "events.jsonl", "ab") as events:
        events.write(b'{"block": 0, "rou\n[1]\n\xff\xfe\n{"block": "?", "round": 1, "valid": 3}\n17')
    assert read([folder], tmp_path / "report.html")[0] == whole


def test_the_same_run_gives_the_same_bytes_whatever_the_machine_likes(tmp_path: Path) -> None:
    folder = make(tmp_path / "x")
    for n, own in ((1, {}), (2, {"font.size": 30, "lines.linewidth": 9, "svg.fonttype": "path", "axes.grid": True})):
        with matplotlib.rc_context(own):
            write_report([folder], tmp_path / f"{n}.html")
            write_report([folder], tmp_path / f"{n}.svg")
            assert all(matplotlib.rcParams[name] == value for name, value in own.items())
    for kind in ("html", "svg"):
        assert (tmp_path / f"1.{kind}").read_bytes() == (tmp_path / f"2.{kind}").read_bytes()


def test_pictures_by_suffix(tmp_path: Path) -> None:
    folder = make(tmp_path / "x")
    write_report([folder], tmp_path / "x.PNG")
    assert (tmp_path / "x.PNG").read_bytes().startswith(b"\x89PNG")
    other = result()
    other["config"]["method"] = "f3crec"
    write_report([folder, make(tmp_path / "y", other)], tmp_path / "both.svg")
    assert all(name in (tmp_path / "both.svg").read_text() for name in ("fedavg", "f3crec"))
    apart = copy.deepcopy(other)
    apart["mean"] = {"hr@10": 0.4321}
    with pytest.raises(TacitaError, match="no metric in common, so there is no picture"):
        write_report([folder, make(tmp_path / "z", apart)], tmp_path / "x.svg")


def test_seeds_are_taken_together_only_where_nothing_else_differs(tmp_path: Path) -> None:
    folders = []
    for seed, rounds, value in ((1, 5, 0.10), (2, 5, 0.12), (3, 5, 0.17), (1, 9, 0.5), (1, 5, 0.10)):
        run = result()
        run["config"] |= {"seed": seed, "train": {"rounds": rounds}}
        run["mean"] = scores(value)
        folders.append(make(tmp_path / f"run-{len(folders)}", run))
    first, second = group_seeds([read_run(folder) for folder in folders])
    assert (first.seeds, second.seeds) == ([1, 2, 3], [1])  # a seed that is there twice counts once
    mean, half = first.means["ndcg@20"]
    assert mean == pytest.approx(0.13)
    assert half == pytest.approx(4.302653 * 0.036055513 / 3**0.5, rel=1e-6)  # t of two degrees of freedom
    assert math.isnan(second.means["ndcg@20"][1])
    _, observations = read(folders, tmp_path / "report.html")
    assert f"{mean:.4f} ± {half:.4f}" in observations.text


def seeded(tmp_path: Path, *tries: tuple[int, int, float], **more: Any) -> list[Path]:
    """Folders of one recipe by seed, seed of the split and figure."""
    folders = []
    for seed, split, value in tries:
        run = result()
        run["config"] |= {"seed": seed, "split": {"kind": "random", "seed": split}, **more}
        run["data"] |= {"fingerprint": f"split-{split}", "source": "the same"}
        run["mean"] = scores(value)
        folders.append(make(tmp_path / f"run-{len(list(tmp_path.iterdir()))}", run))
    return folders


def test_splits_are_taken_together_as_seeds_are(tmp_path: Path) -> None:
    folders = seeded(tmp_path, (1, 1, 0.10), (2, 2, 0.12), (3, 3, 0.17), (3, 4, 0.15))
    (entry,) = read_groups(folders)
    assert (entry.seeds, entry.splits, entry.n_distinct, entry.note) == ([1, 2, 3, 3], [1, 2, 3, 4], 4, "")
    assert entry.means["ndcg@20"] == pytest.approx(compute_confidence_interval([0.10, 0.12, 0.17, 0.15]))
    other = seeded(tmp_path, (1, 1, 0.2), (2, 2, 0.2), method="f3crec")
    rows = make_rows(read_groups([*folders, *other]))
    assert [row["protocol"] for row in rows] == [0, 1]  # not over the same splits
    assert [row["splits"] for row in rows] == ["1 2 3 4", "1 2"]
    apart = json.loads((folders[0] / "result.json").read_text())
    apart["data"]["source"] = "other data"
    assert len(read_groups([*folders, make(tmp_path / "apart", apart)])) == 2


def test_controls_make_no_other_recipe(tmp_path: Path) -> None:
    folders = []
    for seed in (1, 2):
        run = result()
        run["config"] |= {"seed": seed, "evaluate": {**run["config"]["evaluate"], "controls": seed == 1}}
        run["controls"] = run["controls"] if seed == 1 else {}
        run["mean"] = scores(0.1 * seed)
        folders.append(make(tmp_path / f"{seed}", run))
    (entry,) = read_groups(folders)
    assert entry.n_distinct == 2


SAME = (
    (((1, 0, 0.1), (2, 0, 0.1), (3, 0, 0.1)), 1, "these 3 runs are the same numbers: vary split.seed"),
    (((1, 1, 0.1), (2, 2, 0.1)), 1, "these 2 runs are the same numbers: nothing in them is drawn"),
    (
        ((1, 1, 0.1), (2, 1, 0.1), (1, 2, 0.2)),
        2,
        "1 of these 3 runs have the numbers of another and count once: vary split.seed",
    ),
)


@pytest.mark.parametrize(("tries", "distinct", "note"), SAME)
def test_identical_runs_are_reported_and_counted_once(
    tmp_path: Path, tries: tuple[tuple[int, int, float], ...], distinct: int, note: str
) -> None:
    folders = seeded(tmp_path, *tries)
    (entry,) = read_groups(folders)
    assert (entry.n_distinct, entry.note) == (distinct, note)
    mean, half = entry.means["ndcg@20"]
    assert mean == pytest.approx(0.1 if distinct == 1 else 0.15)
    assert math.isnan(half) if distinct == 1 else half == pytest.approx(compute_confidence_interval([0.1, 0.2])[1])
    row = make_rows([entry])[0]
    assert (row["runs"], row["note"]) == (distinct, note)
    assert (row["ndcg@20 half-width 95"] is None) == (distinct == 1)
    report = render_latex([entry])
    assert f": {note}\n" in report
    assert ("pm" in report) == (distinct > 1)
    _, observations = read(folders, tmp_path / "report.html")
    assert note in observations.text
    assert "± 0.0000" not in observations.text


def test_tables_say_how_runs_were_read(tmp_path: Path) -> None:
    reads, other = result(), result()
    reads["config"] |= {"backbone": {"name": "tally"}, "evaluate": {**reads["config"]["evaluate"], "read": "known"}}
    reads["read"], other["read"] = "known", None
    folders = [make(tmp_path / "reads", reads), make(tmp_path / "other", other)]
    groups = read_groups(folders)
    assert [row["read"] for row in csv.DictReader(io.StringIO(render_csv(groups)))] == ["known", ""]
    lines = render_latex(groups).splitlines()
    assert lines[0].endswith("not all comparable")
    assert any(line.startswith("tally & known & 1 &") for line in lines)
    assert any(line.startswith("fedavg - mf & -- & 1 &") for line in lines)
    for alone, message in ((groups[:1], True), (groups[1:], False)):
        report = render_latex(alone)
        assert "comparable" not in report  # with nothing
        assert ("read &" in report) == message
    assert compare(folders)["read"].to_list() == ["known", ""]
    assert compare(folders, over="seeds")["read"].to_list() == ["known", ""]


def test_names_are_escaped_for_latex() -> None:
    assert escape_latex("a_b & 5% {x} \\y ~ ^") == (
        r"a\_b \& 5\% \{x\} \textbackslash{}y \textasciitilde{} \textasciicircum{}"
    )


@pytest.mark.parametrize("name", ["result.json", "events.jsonl", "config.toml"])
def test_a_missing_file_is_named_in_one_sentence(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "x")
    (folder / name).unlink()
    with pytest.raises(TacitaError, match=name) as error:
        write_report([folder], tmp_path / "report.html")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "report.html").exists()


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TacitaError, match="no run folder given"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(TacitaError, match=r"no run folder .*nowhere"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")
    with pytest.raises(TacitaError, match="cannot write"):
        write_report([make(tmp_path / "x")], tmp_path / "no" / "report.html")


def damaged() -> list[Any]:
    whole = result()
    out: list[Any] = [[], "text", None, {}]
    for key in ("config", "data", "blocks", "mean", "continual", "controls", "bytes"):
        out += [{k: v for k, v in whole.items() if k != key}, {**whole, key: 3}]
    for change in ({"on_blocks": [1.0]}, {"new": None}, {"rounds": "many"}):
        broken = copy.deepcopy(whole)
        broken["blocks"][2] |= change
        out.append(broken)
    return out


@pytest.mark.parametrize("content", damaged())
def test_a_damaged_result_is_refused_in_one_sentence(tmp_path: Path, content: Any) -> None:
    folder = make(tmp_path / "x")
    (folder / "result.json").write_text(json.dumps(content))
    with pytest.raises(TacitaError, match=r"result\.json is damaged"):
        write_report([folder], tmp_path / "report.html")


# Drawings


def drawn(svg: str) -> list[tuple[str, dict[str, str], str]]:
    """Every element of a drawing: name, attributes, and what it says or shows when pointed at."""
    return [
        (entry.tag, dict(entry.attrib), entry.findtext("title") or entry.text or "")
        for entry in ElementTree.fromstring(svg).iter()
    ]


def numbers(path: str) -> list[float]:
    return [float(entry) for entry in re.findall(r"-?[\d.]+", path)]


def test_bars_are_as_long_as_their_values() -> None:
    values = [0.3, 0.15, 0.0777]
    series = [Series(f"run {n}", [v], SeriesStyle.nth(n)) for n, v in enumerate(values)]
    boxes = [numbers(a["d"]) for tag, a, _ in drawn(charts.draw_level_bars(series, "NDCG@20", "")) if tag == "path"]
    long = [max(box[::2]) - min(box[::2]) for box in boxes]
    assert [entry / long[0] for entry in long] == pytest.approx([v / 0.3 for v in values], rel=2e-3)


def test_marks_stand_where_their_values_are_and_say_them() -> None:
    values = [0.1, math.nan, 0.4, 0.3]
    svg = charts.draw_line_chart(
        [Series("a & b", values, SeriesStyle(0)), Series("other", [0.2] * 4, SeriesStyle(1))], list("0123"), "", ""
    )
    marks = [(float(a["cx"]), float(a["cy"]), message) for tag, a, message in drawn(svg) if tag == "circle" and message]
    own_values = [mark for mark in marks if mark[2].startswith("a & b")]
    assert [message for *_, message in own_values] == [f"a & b, block {n}: {values[n]:.3f}" for n in (0, 2, 3)]
    (x0, y0, _), (x2, y2, _), (x3, y3, _) = own_values
    assert (y3 - y0) / (y2 - y0) == pytest.approx(2 / 3, rel=2e-3)
    assert (x3 - x2) * 2 == pytest.approx(x2 - x0, rel=2e-3)


def test_a_dot_stands_in_the_middle_of_its_interval_beside_the_published_value() -> None:
    rows = [Dot("FT", 0.2, 0.05, 0.3), Dot("KD", 0.1, math.nan, None)]
    outcome = drawn(charts.draw_dot_chart(rows, ""))
    dots = {message: float(a["cx"]) for tag, a, message in outcome if tag == "circle"}
    assert dots.keys() == {"FT: 0.2000", "KD: 0.1000"}
    (published,) = [
        numbers(a["transform"])[0] for tag, a, message in outcome if tag == "path" and message == "FT, published: 0.3"
    ]
    unit = dots["FT: 0.2000"] - dots["KD: 0.1000"]
    assert published - dots["FT: 0.2000"] == pytest.approx(unit, rel=2e-3)
    spans = [numbers(a["d"]) for tag, a, _ in outcome if tag == "path" and "var(--s0)" in a.get("style", "")]
    assert [span[2] - span[0] for span in spans] == pytest.approx([unit, 0], abs=0.1)
    assert spans[0][0] + spans[0][2] == pytest.approx(2 * dots["FT: 0.2000"], abs=0.1)


def test_drawings_share_a_page_and_its_colours() -> None:
    segment = Segment("block 0", 0, 5, [(1, 0.1), (5, 0.2)], (5, 0.2))
    series = [Series("a", [0.1, 0.2], SeriesStyle(2)), Series("b", [0.3, math.nan], SeriesStyle(8, 1, 4))]
    for svg in (
        charts.draw_line_chart(series, ["0", "1"], "NDCG@20", "alt"),
        charts.draw_bar_chart(series, ["0", "1"], "NDCG@20", "alt"),
        charts.draw_curve_chart([segment], "alt"),
        charts.draw_heat_map([[0.1], [0.05, 0.2]], "alt"),
        charts.draw_dot_chart([Dot("FT", 0.1, 0.01, 0.2)], "alt"),
    ):
        assert svg.startswith('<svg viewBox="0 0 400 ')
        assert not re.search(r"\bid=|href|url\(|#[0-9a-f]{6}", svg)  # no names to clash, no colour of its own
        assert set(re.findall(r"var\(--(\w+)\)", svg)) <= COLOURS.keys()
        assert all("fill" in a["style"] for tag, a, _ in drawn(svg) if tag == "text")


def test_marks_that_do_not_fit_the_sheet_have_no_words() -> None:
    far = Segment("block 0", 0, 5, [(1, 0.1)], (5000, 0.1))
    assert "best after" not in charts.draw_curve_chart([far], "")


# Templates


def test_a_template_escapes_every_text_but_drawings() -> None:
    evil = "<script>&"
    tables = [PageTable(evil, [TableCell(evil)], [[TableCell(evil, "strong", evil, "lower")]])]
    figures = [Figure(evil, "<svg></svg>", evil)]
    shown = {"title": evil, "about": evil, "version": evil, "how": evil, "notes": [evil]}
    page = render("paper.html", **shown, drawn=figures, tables=tables).decode()
    assert "<script" not in page
    assert page.count("&lt;script&gt;&amp;") == 13
    assert "<svg></svg>" in page


def test_a_template_refuses_a_value_it_does_not_get() -> None:
    with pytest.raises(UndefinedError, match="about"):
        render("paper.html", title="", version="", how="", notes=[], drawn=[], tables=[])


def test_matplotlib_waits_for_the_first_drawing() -> None:
    modules = "sys, tacita.cli, tacita.report.pages, tacita.research.experiments.tables"
    script = f"import {modules}; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
