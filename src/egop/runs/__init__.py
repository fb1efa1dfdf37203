"""What a training leaves behind: curves, pictures and pages, as plain values, drawn, and written whole.

``egop diagnose`` and the lab share it; nothing of egop is used here.
"""

from egop.runs import plotting
from egop.runs.pages import document, text
from egop.runs.pictures import Panel, Picture, Series
from egop.runs.records import Curve, Run, finite, replacing, write_json
from egop.runs.training import train

__all__ = [
    "Curve",
    "Panel",
    "Picture",
    "Run",
    "Series",
    "document",
    "finite",
    "plotting",
    "replacing",
    "text",
    "train",
    "write_json",
]
