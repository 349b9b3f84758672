"""Sheets to draw on, through matplotlib: inline SVG that follows a page's colours, or a picture file.

The same drawing gives the same bytes: the machine's own matplotlib settings are left out, and so are dates.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

SERIES = 9  # colours to tell series apart; the last is grey
# Light and dark. The series are Okabe and Ito's, darkened for white paper and lightened for a dark screen.
COLOURS = {
    "ink": ("#1a2230", "#e8edf4"),
    "soft": ("#566274", "#a3afbf"),
    "line": ("#dfe4ea", "#2b3545"),
    "band": ("#eef2f6", "#1e2734"),
    "card": ("#ffffff", "#161d28"),
    "heat": ("#0072b2", "#2f7fb8"),
    "s0": ("#0067a3", "#5ab8f0"),
    "s1": ("#bf7c00", "#ecb53f"),
    "s2": ("#00875f", "#3ccb9f"),
    "s3": ("#9c3f7e", "#e79acb"),
    "s4": ("#d04a00", "#ff8f57"),
    "s5": ("#5b4bc4", "#a99cff"),
    "s6": ("#2f7f8f", "#74cbdc"),
    "s7": ("#6f5b3e", "#cdb48d"),
    "s8": ("#6b7280", "#9aa4b2"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
ON_PAGE = {light: f"var(--{name})" for name, light in LIGHT.items()}
TEXT = 12.0  # pixels
RULES: dict[Any, Any] = {
    "svg.hashsalt": "tacita",
    "svg.fonttype": "none",  # letters stay letters, in the page's font
    "text.parse_math": False,
    "text.color": LIGHT["ink"],
    "font.size": TEXT,
    "axes.edgecolor": LIGHT["soft"],
    "axes.labelcolor": LIGHT["soft"],
    "axes.axisbelow": True,
    "xtick.labelcolor": LIGHT["ink"],
    "ytick.labelcolor": LIGHT["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LIGHT["line"],
    "legend.frameon": False,
}
SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"


class Sheet:
    """One drawing, measured in pixels from its left upper corner."""

    def __init__(self, wide: float, high: float) -> None:
        from matplotlib.figure import Figure

        self.wide, self.high = wide, high
        self.figure = Figure(figsize=(wide / 72, high / 72), dpi=72)  # 72 to the inch: a point is a pixel
        self.figure.patch.set_visible(False)
        self._tips: dict[str, Sequence[str]] = {}

    def axes(self, left: float, top: float, right: float, bottom: float) -> Axes:
        """Axes inside these margins."""
        wide, high = self.wide - left - right, self.high - top - bottom
        axes = self.figure.add_axes((left / self.wide, bottom / self.high, wide / self.wide, high / self.high))
        axes.patch.set_visible(False)
        return axes

    def canvas(self) -> Axes:
        """Axes over the whole sheet whose coordinates are its pixels, without scales."""
        axes = self.axes(0, 0, 0, 0)
        axes.set(xlim=(0, self.wide), ylim=(self.high, 0))
        axes.set_axis_off()
        return axes

    def text(self, x: float, y: float, words: str, **kind: Any) -> None:
        self.figure.text(x / self.wide, 1 - y / self.high, words, **kind)

    def add_tips(self, artist: Artist, words: Sequence[str]) -> None:
        """What each mark of an artist says when it is pointed at."""
        name = f"tip-{len(self._tips)}"
        artist.set_gid(name)
        self._tips[name] = words

    def to_svg(self, alt: str) -> str:
        """An element for a page: colours are the page's, nothing refers to anything, `alt` says it in words."""
        root = ElementTree.fromstring(self.save("svg"))
        shapes = {f"#{one.get('id')}": one for one in root.iter(f"{SVG}path") if one.get("id")}
        for group in root.iter(f"{SVG}g"):
            words = self._tips.get(group.get("id", ""), [])
            marks = list(group.iter(f"{SVG}use")) or list(group.iter(f"{SVG}path"))
            if len(words) == len(
                marks
            ):  # matplotlib leaves out marks beyond the sheet: better no word than a wrong one
                for mark, said in zip(marks, words, strict=True):
                    ElementTree.SubElement(mark, f"{SVG}title").text = said
        inside = "".join(_serialise_element(one, shapes) for one in root)
        box = f"0 0 {_format_number(self.wide)} {_format_number(self.high)}"
        return f'<svg viewBox="{box}" role="img" aria-label="{escape(alt)}">{inside}</svg>'

    def save(self, kind: str) -> bytes:
        """A file of its own, "svg" or "png"."""
        page = io.BytesIO()
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        self.figure.savefig(page, format=kind, dpi=72 if kind == "svg" else 150, metadata=metadata)
        return page.getvalue()


@contextmanager
def open_sheet(wide: float, high: float) -> Iterator[Sheet]:
    """A new sheet; draw and save inside, where our rules hold."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the measuring font does not have
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RULES)
        yield Sheet(wide, high)


def _serialise_element(element: ElementTree.Element, shapes: dict[str, ElementTree.Element]) -> str:
    """An element without names, links and clips, so that many drawings share a page; groups dissolve."""
    tag = element.tag.removeprefix(SVG)
    if tag in ("defs", "metadata"):
        return ""
    inside = "".join(_serialise_element(child, shapes) for child in element)
    if tag == "g":
        return inside
    if tag in ("text", "title"):
        inside = escape(element.text or "", quote=False)
    kept = {name: _shorten_numbers(element.get(name, "")) for name in ("d", "x", "y") if element.get(name)}
    style = element.get("style", "")
    if tag == "use":
        tag, kept = _place_marker(shapes[element.get(LINK, "")].get("d", ""), kept["x"], kept["y"])
    turn = element.get("transform", "")
    if turn and not turn.startswith("rotate(-0 "):
        kept["transform"] = _shorten_numbers(turn)
    if style := _clean_style(style):
        kept["style"] = style
    told = "".join(f' {name}="{escape(value)}"' for name, value in kept.items())
    return f"<{tag}{told}>{inside}</{tag}>" if inside else f"<{tag}{told}/>"


def _place_marker(path: str, x: str, y: str) -> tuple[str, dict[str, str]]:
    """A marker at its place; curves are circles, which say so in fewer bytes."""
    if "C" in path:
        return "circle", {"cx": x, "cy": y, "r": _shorten_numbers(path.split()[2])}  # the path begins at (0, r)
    return "path", {"d": _shorten_numbers(path), "transform": f"translate({x} {y})"}


def _clean_style(text: str) -> str:
    pairs = dict(one.split(": ", 1) for one in text.split("; ") if one)
    pairs.pop("font-family", None)
    if pairs.get("font-size") == f"{TEXT:.0f}px":
        del pairs["font-size"]
    return ";".join(f"{name}:{ON_PAGE.get(value, value)}" for name, value in pairs.items())


def _format_number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _shorten_numbers(text: str) -> str:
    """The same with at most two decimals and no needless spaces."""
    return re.sub(r"-?\d+\.\d+", lambda found: _format_number(float(found[0])), " ".join(text.split()))
