"""What a method takes of each device, in memory, communication and products: from shapes alone.

The built-in models can be named to ``egop plan``: ``egop.diagnostics.scaling:gpt2``.
"""

from egop.diagnostics.scaling.parts import Memory, Part, Traffic, parts_of, plan_of, total
from egop.diagnostics.scaling.shapes import gpt2, llama_1b, llama_8b, load_model, resnet50
from egop.diagnostics.scaling.tables import STRUCTURES, Estimate, Report, report

__all__ = [
    "STRUCTURES",
    "Estimate",
    "Memory",
    "Part",
    "Report",
    "Traffic",
    "gpt2",
    "llama_1b",
    "llama_8b",
    "load_model",
    "parts_of",
    "plan_of",
    "report",
    "resnet50",
    "total",
]
