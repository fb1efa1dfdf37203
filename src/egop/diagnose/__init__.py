"""Advice from one short race: which optimizer to use and at which learning rate (``diagnose``, ``find_lr``).

Candidates train copies of the model for a few steps each. The model itself stays as it is.
"""

from egop.diagnose.diagnosis import CANDIDATES, Diagnosis, diagnose
from egop.diagnose.race import Comparison, Race
from egop.diagnose.rates import FoundRates, find_lr
from egop.diagnose.training import Run

__all__ = ["CANDIDATES", "Comparison", "Diagnosis", "FoundRates", "Race", "Run", "diagnose", "find_lr"]
