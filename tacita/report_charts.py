"""Charts as inline SVG that follow the page's colours, and one picture of a run through matplotlib.

Every chart takes plain numbers and names, escapes what it writes, and shows NaN as "nothing there".
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tacita.files import write_bytes

WIDE, HIGH = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 26, 40
MOST_CELLS = 40  # blocks shown in a heat map
MOST_POINTS = 1500  # of a curve

# Okabe and Ito's colours, darkened for white paper and lightened for a dark screen.
LIGHT = ("#0067a3", "#bf7c00", "#00875f", "#9c3f7e", "#d04a00", "#5b4bc4", "#2f7f8f", "#6f5b3e", "#6b7280")
DARK = ("#5ab8f0", "#ecb53f", "#3ccb9f", "#e79acb", "#ff8f57", "#a99cff", "#74cbdc", "#cdb48d", "#9aa4b2")
GREY = len(LIGHT) - 1
DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4")
SHAPES = ("circle", "square", "triangle", "diamond", "ring")


PAGE_CSS = """
:root{color-scheme:light dark;
--font:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
--paper:#f5f7fa;--card:#fff;--ink:#1a2230;--soft:#566274;--line:#dfe4ea;--band:#eef2f6;--heat:#0072b2;
--good:#e4f4ec;--good-edge:#00875f;--note:#fff5dd;--note-edge:#bf7c00;--bad:#fdeae2;--bad-edge:#c24100}
@media screen and (prefers-color-scheme:dark){:root{--paper:#0e131b;--card:#161d28;--ink:#e8edf4;
--soft:#a3afbf;
--line:#2b3545;--band:#1e2734;--heat:#2f7fb8;--good:#12302a;--good-edge:#3ccb9f;--note:#332a14;
--note-edge:#ecb53f;
--bad:#3a2018;--bad-edge:#ff8f57}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 var(--font);overflow-wrap:anywhere}
main,header,footer{max-width:1080px;margin:0 auto;padding:0 20px}
header{padding-top:36px}header p{margin:4px 0 20px;color:var(--soft)}
h1{font-size:clamp(1.5rem,4vw,2.1rem);line-height:1.2;margin:0}h2{margin:36px 0 12px}
h3{font-size:1.05rem;margin:0 0 8px}
main>h3,details.run>h3{margin:32px 0 10px}
.brand{font-size:.8rem;letter-spacing:.08em;text-transform:uppercase}
.good,.note,.bad{margin:0 0 10px;padding:11px 16px;border-left:4px solid;border-radius:6px}
.good{background:var(--good);border-color:var(--good-edge)}
.note{background:var(--note);border-color:var(--note-edge)}
.bad{background:var(--bad);border-color:var(--bad-edge);font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(132px,1fr));gap:12px;margin:18px 0}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.tiles b{display:block;font-size:1.4rem;line-height:1.25;font-variant-numeric:tabular-nums}
.tiles span{display:block;font-size:.9rem}small{color:var(--soft);font-size:.8rem}
.tiles small{line-height:1.3;display:block}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:16px;margin-bottom:16px}
figure{margin:0;padding:16px 18px 14px;background:var(--card);border:1px solid var(--line);
border-radius:10px}
figure>svg{display:block;width:100%;height:auto}
figcaption,.how{color:var(--soft);font-size:.88rem;margin-top:8px}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:0 0 8px;padding:0;font-size:.85rem}
.legend li{display:flex;align-items:center;gap:6px}.legend svg{flex:none}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:0 0 14px;overflow:hidden}
h4{margin:0;padding:12px 14px 4px;font-size:.92rem}.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:7px 14px;text-align:right;font-weight:400;border-top:1px solid var(--line);vertical-align:top}
td{white-space:nowrap}
thead th{color:var(--soft);font-size:.82rem;border-top:0;vertical-align:bottom;white-space:nowrap}
tbody th,th:first-child{position:sticky;left:0;background:var(--card);min-width:7em}
th:first-child:has(small){min-width:11em}
th:first-child{text-align:left}tbody th small{display:block}thead b{color:var(--ink)}
.beats{color:var(--bad-edge);font-weight:600}.list{display:inline-block;white-space:normal;min-width:8em}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 18px;margin:0 0 14px;font-size:.92rem}
dt{color:var(--soft)}dd{margin:0}code,pre{font:.85em/1.5 ui-monospace,Menlo,Consolas,monospace}
details{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:10px 16px;
margin:0 0 12px}
details.run{background:none}summary{cursor:pointer;font-weight:600}
details.run[open]>summary{margin-bottom:14px}
pre{overflow-x:auto;margin:10px 0 0}footer{padding:24px 20px 40px;color:var(--soft);font-size:.85rem}
@media(max-width:520px){main,header,footer{padding-left:14px;padding-right:14px}
figure{padding:14px 12px 12px}
.tiles{grid-template-columns:1fr 1fr}.tiles div:first-child{grid-column:span 2}th,td{padding:7px 10px}
svg text{font-size:14px}svg .small{font-size:12px}}
@media print{:root{color-scheme:light;--paper:#fff;print-color-adjust:exact}body{font-size:10pt}
header{padding-top:0}h3{break-after:avoid}main>h2{display:none}svg text{font-size:14px}
figure,.card,.tiles,.good,.note,.bad{break-inside:avoid}.figures{grid-template-columns:1fr 1fr}
.card,.scroll{overflow:visible}table{font-size:.78rem}th,td{padding:4px 6px}
thead th{white-space:normal;overflow-wrap:normal}th:first-child:has(small){min-width:8em}
.tiles{grid-template-columns:repeat(4,1fr)}pre{white-space:pre-wrap}
details.run{border:0;padding:0;break-before:page}
details::details-content{content-visibility:visible;height:auto}}
"""


@dataclass(frozen=True)
class Look:
    """How a series can be told apart, by colour or without."""

    colour: int
    dash: int = 0
    shape: int = 0

    @property
    def css(self) -> str:
        return f"--c:var(--s{self.colour})"

    @staticmethod
    def number(n: int) -> Look:
        """The n-th of many: colours first, then dashes."""
        return Look(n % GREY, n // GREY % len(DASHES), n % len(SHAPES))


@dataclass(frozen=True)
class Series:
    name: str
    values: list[float]  # one per block
    look: Look


@dataclass(frozen=True)
class Segment:
    """The validation curve of one block, in rounds counted over the whole run."""

    name: str
    start: int
    end: int
    points: list[tuple[int, float]]
    best: tuple[int, float] | None


def palette_css() -> str:
    """The colours as variables, for light, dark and paper."""

    def colours(values: Sequence[str]) -> str:
        return "".join(f"--s{n}:{v};" for n, v in enumerate(values))

    return (
        f":root{{{colours(LIGHT)}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{colours(DARK)}}}}}"
        "svg text{fill:var(--ink);font:12px var(--font)}svg .soft{fill:var(--soft)}"
        "svg .grid{stroke:var(--line)}svg .axis{stroke:var(--soft)}"
        "svg .line{stroke:var(--c);fill:none;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}"
        "svg .mark{fill:var(--c);stroke:var(--card);stroke-width:1.2}"
        "svg .mark.ring{fill:var(--card);stroke:var(--c);stroke-width:2.2}"
        "svg .bar{fill:var(--c)}svg .band{fill:var(--band)}svg .cell{fill:var(--heat)}"
        "svg .end,svg .mid{text-anchor:middle}svg .end{text-anchor:end}svg .small{font-size:10.5px}"
        "svg .strong{font-weight:600}"
    )


def short(value: float) -> str:
    """A number for the face of a chart."""
    return "–" if not math.isfinite(value) else f"{value:.3f}"


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to just past `top`."""
    if not math.isfinite(top) or top < 1e-9:
        return [0.0, 1.0]
    size = 10.0 ** math.floor(math.log10(top / 4))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size * 5 >= top)
    return [n * step for n in range(math.ceil(top / step - 1e-9) + 1)]


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def _svg(alt: str, body: Sequence[str], high: float = HIGH) -> str:
    return f'<svg viewBox="0 0 {WIDE} {high:.0f}" role="img" aria-label="{escape(alt)}">' + "".join(body) + "</svg>"


def _tip(inside: str, words: str) -> str:
    return f"<g><title>{escape(words)}</title>{inside}</g>"


def _mark(look: Look, x: float, y: float, r: float = 4.5) -> str:
    shape = SHAPES[look.shape % len(SHAPES)]
    if shape in ("circle", "ring"):
        return f'<circle class="mark {shape}" cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>'
    corners = {
        "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
        "triangle": [(0, -1.2), (1.1, 0.9), (-1.1, 0.9)],
        "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
    }[shape]
    where = " ".join(f"{x + r * a:.1f},{y + r * b:.1f}" for a, b in corners)
    return f'<polygon class="mark" points="{where}"/>'


def legend(series: Sequence[Series], lines: bool = True) -> str:
    """Names with their colours, as HTML so that it wraps on a phone."""
    out = []
    for one in series:
        dash = f' stroke-dasharray="{DASHES[one.look.dash]}"' if one.look.dash else ""
        sample = f'<path class="line" d="M1 7H27"{dash}/>{_mark(one.look, 14, 7, 4)}'
        if not lines:
            sample = '<rect class="bar" x="7" y="1" width="13" height="12" rx="2"/>'
        key = f'<svg width="28" height="14" viewBox="0 0 28 14" aria-hidden="true">{sample}</svg>'
        out.append(f'<li style="{one.look.css}">{key}{escape(one.name)}</li>')
    return f'<ul class="legend">{"".join(out)}</ul>'


def _scale(values: Sequence[float]) -> tuple[list[float], float]:
    marks = ticks(max((v for v in values if math.isfinite(v)), default=0.0))
    return marks, marks[-1]


def _y(value: float, top: float) -> float:
    return HIGH - BOTTOM - (HIGH - BOTTOM - TOP) * value / top


def _frame(marks: list[float], metric: str, x_title: str) -> list[str]:
    out = [_text(2, 13, metric, "soft"), _text((LEFT + WIDE - RIGHT) / 2, HIGH - 5, x_title, "soft mid")]
    digits = max(len(f"{v:.8f}".rstrip("0").partition(".")[2]) for v in marks)
    for value in marks:
        y = _y(value, marks[-1])
        kind = "grid" if value else "axis"
        out.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(_text(LEFT - 6, y + 4, f"{value:.{digits}f}" if value else "0", "soft end"))
    return out


def _x_labels(names: Sequence[str], at: Sequence[float]) -> list[str]:
    every = math.ceil(len(names) / 12)
    return [_text(at[n], HIGH - BOTTOM + 17, names[n], "mid") for n in range(0, len(names), every)]


def lines(series: Sequence[Series], names: Sequence[str], metric: str, alt: str) -> str:
    """Quality per block, one line each."""
    marks, top = _scale([v for s in series for v in s.values])
    step = (WIDE - LEFT - RIGHT) / len(names)
    at = [LEFT + step * (n + 0.5) for n in range(len(names))]
    out = [*_frame(marks, metric, "block"), *_x_labels(names, at)]
    for one in reversed(series):  # the first series on top
        spots = [(n, at[n], _y(v, top)) for n, v in enumerate(one.values) if math.isfinite(v)]
        path = "".join(
            f"{'L' if k and n == spots[k - 1][0] + 1 else 'M'}{x:.1f} {y:.1f}" for k, (n, x, y) in enumerate(spots)
        )
        dash = f' stroke-dasharray="{DASHES[one.look.dash]}"' if one.look.dash else ""
        drawn = [f'<path class="line" d="{path}"{dash}/>'] if path else []
        if len(names) <= 40:
            drawn += [
                _tip(_mark(one.look, x, y), f"{one.name}, block {names[n]}: {short(one.values[n])}")
                for n, x, y in spots
            ]
        out.append(f'<g style="{one.look.css}">{"".join(drawn)}</g>')
    return _svg(alt, out)


def level_bars(series: Sequence[Series], metric: str, alt: str) -> str:
    """One lying bar each, number beside it, name in front, or above where names are long."""
    top = max([s.values[0] for s in series if math.isfinite(s.values[0])] + [1e-12])
    above = any(len(s.name) > 18 for s in series)
    left, row, room = (4, 44, 390) if above else (128, 34, 270)
    out = [_text(2, 13, metric, "soft")]
    for n, one in enumerate(series):
        y = 26 + row * n
        name = one.name if len(one.name) <= 56 else one.name[:55] + "…"
        out.append(_text(4, y + 8, name) if above else _text(left - 8, y + 15, name, "end"))
        y += 13 if above else 0
        wide = max(1.0, room * one.values[0] / top) if math.isfinite(one.values[0]) else 1.0
        bar = f'<rect class="bar" style="{one.look.css}" x="{left}" y="{y}" width="{wide:.1f}" height="20" rx="2"/>'
        out += [bar, _text(left + 6 + wide, y + 15, short(one.values[0]))]
    return _svg(alt, out, 30 + row * len(series))


def bars(series: Sequence[Series], names: Sequence[str], metric: str, alt: str) -> str:
    """Groups of standing bars, one group a block; a missing value leaves a dash at its place."""
    marks, top = _scale([v for s in series for v in s.values])
    step = (WIDE - LEFT - RIGHT) / len(names)
    wide = min(44.0, step * 0.8 / len(series))
    gap = min(2.0, wide * 0.2)
    at = [LEFT + step * (n + 0.5) for n in range(len(names))]
    out = [*_frame(marks, metric, "block"), *_x_labels(names, at)]
    for k, one in enumerate(series):
        for n, value in enumerate(one.values):
            x = at[n] + wide * (k - len(series) / 2)
            y = _y(value, top) if math.isfinite(value) else _y(0, top)
            inside = f'<rect class="bar" x="{x + gap / 2:.2f}" y="{y:.1f}" rx="{gap:.1f}" '
            inside += f'width="{wide - gap:.2f}" height="{_y(0, top) - y:.1f}"/>'
            if wide >= 28 or (wide >= 8 and not math.isfinite(value)):
                kind = "mid small" if math.isfinite(value) else "mid soft"
                inside += _text(x + wide / 2, y - 4, short(value), kind)
            tip = f"{one.name}, block {names[n]}: {short(value)}"
            out.append(f'<g style="{one.look.css}">{_tip(inside, tip)}</g>')
    return _svg(alt, out)


def curve(segments: Sequence[Segment], alt: str) -> str:
    """The validation score over all rounds; every other block is shaded, best rounds are ringed."""
    last = max([s.end for s in segments] + [1])
    marks, top = _scale([v for s in segments for _, v in s.points])

    def at(rounds: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * rounds / last

    bands, drawn, label_end = [], [], 0.0
    for n, one in enumerate(segments):
        x, wide = at(one.start), at(one.end) - at(one.start)
        if n % 2:
            tall = HIGH - BOTTOM - TOP
            bands.append(f'<rect class="band" x="{x:.1f}" y="{TOP}" width="{wide:.1f}" height="{tall}"/>')
        middle = x + wide / 2
        words = one.name if wide > 7 * len(one.name) else one.name.removeprefix("block ")
        if middle - 3.6 * len(words) > label_end + 4:
            drawn.append(_text(middle, TOP - 5, words, "mid small"))
            label_end = middle + 3.6 * len(words)
        thin = one.points[:: len(one.points) // MOST_POINTS + 1]
        path = " ".join(f"{at(r):.1f},{_y(v, top):.1f}" for r, v in thin)
        drawn.append(f'<polyline class="line" points="{path}"/>')
    for one in segments:
        if one.best:
            size = 5 if len(segments) <= 20 else 2.5
            spot = _mark(Look(1, shape=4), at(one.best[0]), _y(one.best[1], top), size)
            tip = f"{one.name}: best after round {one.best[0] - one.start}, {short(one.best[1])}"
            drawn.append(f'<g style="--c:var(--s1)">{_tip(spot, tip)}</g>')
    rounds = [_text(at(r), HIGH - BOTTOM + 17, f"{r:.0f}", "mid") for r in ticks(last) if r <= last and r % 1 == 0]
    frame = _frame(marks, "", "round, counted over all blocks")
    return _svg(alt, [*bands, *frame, *rounds, '<g style="--c:var(--s0)">', *drawn, "</g>"])


def heat(matrix: Sequence[Sequence[float]], alt: str) -> str:
    """a_{t,s} as cells: number, and below the diagonal the change since the block was learned."""
    shown = list(range(len(matrix)))
    if len(shown) > MOST_CELLS:
        shown = sorted({round(n * (len(matrix) - 1) / (MOST_CELLS - 1)) for n in range(MOST_CELLS)})
    wide = (WIDE - 64 - 6) / len(shown)
    tall = min(46.0, max(wide, 8.0), 300 / len(shown))
    tops = {s: max((row[s] for row in matrix[s:] if math.isfinite(row[s])), default=0.0) for s in shown}
    every = math.ceil(len(shown) / 12)
    out = [_text(64, 13, "tested on block", "soft"), _text(2, 34, "after", "soft")]
    for k, t in enumerate(shown):
        x, y = 64 + wide * k, 42 + tall * k
        if k % every == 0:
            out.append(_text(x + wide / 2, 34, str(t), "mid"))
            out.append(_text(56, y + tall / 2 + 4, f"block {t}", "end"))
        for j, s in enumerate(shown[: k + 1]):
            out.append(_cell(matrix, t, s, (64 + wide * j, y, wide, tall), tops[s]))
    return _svg(alt, out, 50 + tall * len(shown))


def _cell(matrix: Sequence[Sequence[float]], t: int, s: int, box: tuple[float, float, float, float], top: float) -> str:
    x, y, wide, tall = box
    value, learned = matrix[t][s], matrix[s][s]
    share = value / top if top > 0 and math.isfinite(value) else 0.0
    change = value / learned - 1 if t > s and learned > 0 and math.isfinite(value) else math.nan
    inside = f'<rect class="cell" fill-opacity="{0.05 + 0.65 * share:.2f}" x="{x + 1:.1f}" y="{y + 1:.1f}" '
    inside += f'width="{max(0.5, wide - 2):.1f}" height="{max(0.5, tall - 2):.1f}" rx="{min(3, tall / 6):.1f}"/>'
    words = f"{round(change, 2) + 0.0:+.0%}".replace("-", "−") if math.isfinite(change) else ""
    if wide >= 36 and tall >= 34:
        lift = 0 if words else 5
        inside += _text(x + wide / 2, y + tall / 2 - 2 + lift, short(value), "mid strong" if t == s else "mid")
        inside += _text(x + wide / 2, y + tall / 2 + 13, words, "mid small") if words else ""
    elif wide >= 30:
        inside += _text(x + wide / 2, y + tall / 2 + 4, short(value), "mid small")
    return _tip(inside, f"after block {t}, tested on block {s}: {short(value)} {words}".rstrip())


def draw_picture(
    title: str,
    metric: str,
    valid_metric: str,
    names: Sequence[str],
    series: Sequence[Series],
    segments: Sequence[Segment],
    out: Path,
) -> None:
    """Quality per block and the validation curve side by side, as PNG or SVG by the suffix."""
    import io

    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that the font does not have
        matplotlib.rcParams.update({"svg.hashsalt": "tacita", "font.size": 10, "text.parse_math": False})
        matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
        figure = Figure(figsize=(10.4, 4.0), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        figure.suptitle(title if len(title) <= 110 else title[:109] + "…", fontsize=12, fontweight="bold")
        left, right = figure.subplots(1, 2)
        for n, one in enumerate(series):
            dash = {0: "-", 1: "--", 2: ":", 3: "-.", 4: (0, (8, 2))}[one.look.dash]
            colour, shape = LIGHT[one.look.colour], "os^Dv"[one.look.shape]
            left.plot(
                names,
                one.values,
                color=colour,
                ls=dash,
                marker=shape,
                label=one.name,
                zorder=9 - n,
                lw=2,
                ms=6,
            )
        left.set(xlabel="block", ylabel=metric, title="Test quality per block")
        for k, part in enumerate(segments):
            if k % 2:
                right.axvspan(part.start, part.end, color="#eef1f5", lw=0)
            right.plot([r for r, _ in part.points], [v for _, v in part.points], color=LIGHT[0], lw=1.8)
        best = [s.best for s in segments if s.best]
        spots = [r for r, _ in best], [v for _, v in best]
        right.plot(*spots, "o", mfc="white", mec=LIGHT[1], mew=2, ms=7, label="best round of a block")
        right.set(xlabel="round, blocks shaded in turn", ylabel=valid_metric, title="Validation quality over rounds")
        for axes in (left, right):
            axes.set_ylim(bottom=0)
            axes.grid(axis="y", color="#e3e7ec", lw=0.8)
            axes.set_axisbelow(True)
            axes.legend(frameon=False, fontsize=9)
        kind = out.suffix.lower().lstrip(".")
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        page = io.BytesIO()
        figure.savefig(page, format=kind, dpi=150, metadata=metadata)
    write_bytes(out, page.getvalue())
