"""The charts of result pages: each takes plain numbers and names, and shows NaN as "nothing there"."""

from tacita.report.charts.bars import draw_bar_chart, draw_level_bars
from tacita.report.charts.curve import draw_curve, draw_curve_chart
from tacita.report.charts.dots import draw_dot_chart, draw_dot_picture
from tacita.report.charts.frame import BOTTOM_MARGIN, shorten_text
from tacita.report.charts.heat_map import MOST_CELLS, draw_heat_map
from tacita.report.charts.lines import draw_line_chart, plot_series
from tacita.report.charts.picture import Picture, draw_picture
from tacita.report.charts.series import GREY, Dot, Segment, Series, SeriesStyle

__all__ = [
    "BOTTOM_MARGIN",
    "GREY",
    "MOST_CELLS",
    "Dot",
    "Picture",
    "Segment",
    "Series",
    "SeriesStyle",
    "draw_bar_chart",
    "draw_curve",
    "draw_curve_chart",
    "draw_dot_chart",
    "draw_dot_picture",
    "draw_heat_map",
    "draw_level_bars",
    "draw_line_chart",
    "draw_picture",
    "plot_series",
    "shorten_text",
]
