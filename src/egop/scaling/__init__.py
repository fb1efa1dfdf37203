"""What a method takes of each device, in memory, communication and products: from shapes alone.

The built-in models can be named to ``egop plan``: ``egop.scaling:gpt2``.
"""

from egop.scaling.parts import Memory, Part, Traffic, parts_of, plan_of, total
from egop.scaling.report import Estimate, Report, report
from egop.scaling.shapes import gpt2, llama_1b, llama_8b, resnet50

__all__ = [
    "Estimate",
    "Memory",
    "Part",
    "Report",
    "Traffic",
    "gpt2",
    "llama_1b",
    "llama_8b",
    "parts_of",
    "plan_of",
    "report",
    "resnet50",
    "total",
]
