"""Sheets to draw on, through matplotlib: inline SVG that follows a page's colours, or a picture file.

The same drawing gives the same bytes: neither the machine's own matplotlib settings nor dates are in it.
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
DPI = 72  # to the inch: a point is a pixel
PNG_DPI = 150
FILE_METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
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

        self.wide = wide
        self.high = high
        inches = (wide / DPI, high / DPI)
        self.figure = Figure(figsize=inches, dpi=DPI)
        self.figure.patch.set_visible(False)
        self._tips: dict[str, Sequence[str]] = {}

    def axes(self, left_margin: float, top_margin: float, right_margin: float, bottom_margin: float) -> Axes:
        """Axes inside these margins."""
        wide = self.wide - left_margin - right_margin
        high = self.high - top_margin - bottom_margin
        x = left_margin / self.wide
        y = bottom_margin / self.high
        box = (x, y, wide / self.wide, high / self.high)
        axes = self.figure.add_axes(box)
        axes.patch.set_visible(False)
        return axes

    def canvas(self) -> Axes:
        """Axes over the whole sheet whose coordinates are its pixels, without scales."""
        axes = self.axes(0, 0, 0, 0)
        self.fit_canvas(axes)
        axes.set_axis_off()
        return axes

    def fit_canvas(self, axes: Axes) -> None:
        """Make pixels the coordinates again, which drawing may have moved."""
        axes.set_xlim(0, self.wide)
        axes.set_ylim(self.high, 0)

    def text(self, x: float, y: float, words: str, **kind: Any) -> None:
        across = x / self.wide
        up = 1 - y / self.high
        self.figure.text(across, up, words, **kind)

    def add_tips(self, artist: Artist, words: Sequence[str]) -> None:
        """What each mark of an artist says when it is pointed at."""
        name = f"tip-{len(self._tips)}"
        artist.set_gid(name)
        self._tips[name] = words

    def to_svg(self, alt: str) -> str:
        """An element for a page: colours are the page's, nothing refers to anything, `alt` says it in words."""
        root = ElementTree.fromstring(self.save("svg"))
        shapes = _list_shapes(root)
        for group in root.iter(f"{SVG}g"):
            words = self._tips.get(group.get("id", ""), [])
            _write_tips(group, words)
        inside = "".join(_serialise_element(element, shapes) for element in root)
        wide = _format_number(self.wide)
        high = _format_number(self.high)
        label = escape(alt)
        return f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="{label}">{inside}</svg>'

    def save(self, kind: str) -> bytes:
        """A file of its own, "svg", "pdf" or "png"; without its date, so that it can be written again."""
        metadata = FILE_METADATA[kind]
        dpi = PNG_DPI if kind == "png" else DPI
        page = io.BytesIO()
        self.figure.savefig(page, format=kind, dpi=dpi, metadata=metadata)
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


def _list_shapes(root: ElementTree.Element) -> dict[str, ElementTree.Element]:
    """The paths that others refer to, by reference."""
    shapes = {}
    for path in root.iter(f"{SVG}path"):
        name = path.get("id")
        if name:
            shapes[f"#{name}"] = path
    return shapes


def _write_tips(group: ElementTree.Element, words: Sequence[str]) -> None:
    """Put the words into a group's marks, if there are as many.

    matplotlib omits marks beyond the sheet: better no word than a wrong one.
    """
    marks = list(group.iter(f"{SVG}use"))
    if not marks:
        marks = list(group.iter(f"{SVG}path"))
    if len(words) != len(marks):
        return
    for mark, tip in zip(marks, words, strict=True):
        title = ElementTree.SubElement(mark, f"{SVG}title")
        title.text = tip


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
    attributes = _list_places(element)
    if tag == "use":
        shape = shapes[element.get(LINK, "")]
        tag, attributes = _place_marker(shape.get("d", ""), attributes["x"], attributes["y"])
    turn = element.get("transform", "")
    is_turned = turn and not turn.startswith("rotate(-0 ")
    if is_turned:
        attributes["transform"] = _shorten_numbers(turn)
    style = _clean_style(element.get("style", ""))
    if style:
        attributes["style"] = style
    return _format_element(tag, attributes, inside)


def _list_places(element: ElementTree.Element) -> dict[str, str]:
    """The path or the coordinates of an element."""
    places = {}
    for name in ("d", "x", "y"):
        value = element.get(name)
        if value:
            places[name] = _shorten_numbers(value)
    return places


def _format_element(tag: str, attributes: dict[str, str], inside: str) -> str:
    text = ""
    for name, value in attributes.items():
        text += f' {name}="{escape(value)}"'
    if not inside:
        return f"<{tag}{text}/>"
    return f"<{tag}{text}>{inside}</{tag}>"


def _place_marker(path: str, x: str, y: str) -> tuple[str, dict[str, str]]:
    """A marker at its place; curves are circles, which say so in fewer bytes."""
    is_circle = "C" in path
    if is_circle:
        radius = path.split()[2]  # the path begins at (0, r)
        return "circle", {"cx": x, "cy": y, "r": _shorten_numbers(radius)}
    return "path", {"d": _shorten_numbers(path), "transform": f"translate({x} {y})"}


def _clean_style(text: str) -> str:
    """Styles in the page's colours, without what the page has by itself."""
    styles = []
    for pair in text.split("; "):
        if not pair:
            continue
        name, value = pair.split(": ", 1)
        is_page_size = name == "font-size" and value == f"{TEXT:.0f}px"
        if name != "font-family" and not is_page_size:
            styles.append(f"{name}:{ON_PAGE.get(value, value)}")
    return ";".join(styles)


def _format_number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _shorten_numbers(text: str) -> str:
    """The same with at most two decimals and no needless spaces."""

    def shorten(match: re.Match[str]) -> str:
        return _format_number(float(match[0]))

    one_spaced = " ".join(text.split())
    return re.sub(r"-?\d+\.\d+", shorten, one_spaced)
