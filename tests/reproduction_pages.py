"""Are the pages under docs/reproduction what their cells give? `python tests/reproduction_pages.py` compares them.

`--write` renders those again that differ, and removes those of which no cell is finished any more. A page's name says
what it shows: the table, then words of `--only`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tacita.core.errors import TacitaError
from tacita.report import accuracy
from tacita.research.experiments.choice_page import render_choice_page
from tacita.research.experiments.experiment_spec import list_experiments, load_experiment
from tacita.research.experiments.reproduction import (
    TablePlan,
    list_statuses,
    plan_table,
    read_finished,
    render_pages,
)

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = DOCS / "reproduction"
PART = "-part"
ENDINGS = (".md", ".csv", ".html", "-points.csv")
OF_OTHER_VERBS = {"fedkdrec/scores-ml-100k"}  # `tacita audit scores`
CHOICE = "choose/choose"


@dataclass(frozen=True)
class TablePages:
    """The pages of a table, or of a part of it."""

    name: str  # PAPER/STEM
    plan: TablePlan

    def list_files(self) -> list[Path]:
        """What is there of it."""
        paths = [RESULTS / f"{self.name}{ending}" for ending in ENDINGS]
        return [path for path in paths if path.is_file()]

    def list_texts(self) -> dict[Path, str]:
        """Path -> what the cells give; nothing, where no cell is finished."""
        statuses = list_statuses(self.plan, RESULTS)
        if all(entry.status == "missing" for entry in statuses):
            return {}
        plan, lines = read_finished(self.plan, RESULTS)
        texts = {}
        for suffix, text in render_pages(plan, lines).items():
            texts[RESULTS / f"{self.name}{suffix}"] = text
        if self.plan.experiment.kind == "choose":
            page = render_choice_page(plan.experiment, self.plan.cells, lines)
            texts = {DOCS / "choose.md": page}
        return texts


def list_pages() -> list[TablePages]:
    """All that are committed."""
    pages = [TablePages(CHOICE, plan_table(CHOICE, [], None, False, RESULTS))]
    for path in sorted(RESULTS.glob("*/*.md")):
        name = path.relative_to(RESULTS).with_suffix("").as_posix()
        if name not in OF_OTHER_VERBS:
            table, words = read_name(name)
            pages.append(TablePages(name, plan_table(table, words, None, False, RESULTS)))
    return pages


def read_name(name: str) -> tuple[str, list[str]]:
    """The table of a page, and the words that narrowed it down."""
    tables = [table for table in list_experiments() if f"{name}-".startswith(f"{table}-")]
    if not tables:
        raise TacitaError(f"{name} is the page of no table; delete it, or name it after one.")
    table = max(tables, key=len)
    rest = name.removeprefix(table).removesuffix(PART).removeprefix("-")
    experiment, _ = load_experiment(table, RESULTS)
    known = sorted([*experiment.datasets, *experiment.backbones, *experiment.variants], key=len, reverse=True)
    return table, list(_split_words(rest, known, name))


def _split_words(rest: str, known: list[str], name: str) -> Iterator[str]:
    """Words joined by dashes, the longest that fits first."""
    while rest:
        fitting = [word for word in known if f"{rest}-".startswith(f"{word}-")]
        if not fitting:
            raise TacitaError(f"{name}: no dataset, backbone or variant of its table is called {rest}.")
        yield fitting[0]
        rest = rest.removeprefix(fitting[0]).removeprefix("-")


def list_lagging(pages: TablePages) -> list[Path]:
    """Files of pages that are not what the cells give."""
    texts = pages.list_texts()
    lagging = [path for path in pages.list_files() if path not in texts]
    for path, text in texts.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            lagging.append(path)
    return lagging


def write_pages(pages: TablePages) -> None:
    """Render pages again; those that no cell gives any more go."""
    texts = pages.list_texts()
    for path in pages.list_files():
        if path not in texts:
            path.unlink()
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        if path.name.endswith("-points.csv"):
            stem = path.name.removesuffix("-points.csv")
            accuracy.write_picture(path, path.with_name(f"{stem}.png"))


def main() -> int:
    n_lagging = 0
    for pages in list_pages():
        lagging = list_lagging(pages)
        for path in lagging:
            print(path.relative_to(DOCS))
        n_lagging += len(lagging)
        if lagging and "--write" in sys.argv:
            write_pages(pages)
    print(f"{n_lagging} files are not what their cells give")
    return 0 if "--write" in sys.argv else min(n_lagging, 1)


if __name__ == "__main__":
    sys.exit(main())
