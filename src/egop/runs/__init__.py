"""What people read: numbers and sizes in words, a training's curves, pictures and pages, drawn and written whole.

The library and the lab share it; nothing of egop is used here. ``plotting`` is imported when it is used, since it
needs matplotlib.
"""

from egop.runs.pages import document, html_table, sparkline, text
from egop.runs.pictures import Mark, Panel, Picture, Series, Span
from egop.runs.records import Curve, Run, finite, replacing, write_json
from egop.runs.training import train
from egop.runs.units import counted, format_bytes, format_count, format_percent, format_table, parse_bytes

__all__ = [
    "Curve",
    "Mark",
    "Panel",
    "Picture",
    "Run",
    "Series",
    "Span",
    "counted",
    "document",
    "finite",
    "format_bytes",
    "format_count",
    "format_percent",
    "format_table",
    "html_table",
    "parse_bytes",
    "plotting",
    "replacing",
    "sparkline",
    "text",
    "train",
    "write_json",
]
