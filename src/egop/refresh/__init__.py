"""When and how a basis is renewed: from samples every so often, or from the training gradients as they come.

A new way is a subclass of ``Refresh``, which begins a ``Refresher`` for each optimizer; or it is put together from
parts: ``Streaming`` of a ``Choice``, a statistic (``GramMatrices``), a ``Schedule`` and a ``Method``.
"""

from egop.optimizer import Rebasable, Refresh, Refresher, Stack, Stacks
from egop.refresh.aligned import Aligned
from egop.refresh.choosing import Choice
from egop.refresh.every import Every
from egop.refresh.grams import GramMatrices, Place
from egop.refresh.methods import FROM_SCRATCH, ITERATION, Method
from egop.refresh.online import Online, WhenDrifted
from egop.refresh.schedules import InTurn, OnceDrifted, Schedule
from egop.refresh.streaming import Streaming

__all__ = [
    "FROM_SCRATCH",
    "ITERATION",
    "Aligned",
    "Choice",
    "Every",
    "GramMatrices",
    "InTurn",
    "Method",
    "OnceDrifted",
    "Online",
    "Place",
    "Rebasable",
    "Refresh",
    "Refresher",
    "Schedule",
    "Stack",
    "Stacks",
    "Streaming",
    "WhenDrifted",
]
