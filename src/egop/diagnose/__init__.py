"""Advice from one short race: which optimizer to use and at which learning rate (``diagnose``, ``find_lr``).

Candidates train copies of the model for a few steps each. The model itself stays as it is.
"""

from egop.diagnose.diagnosis import Diagnosis, diagnose
from egop.diagnose.rates import FoundRates, find_lr

__all__ = ["Diagnosis", "FoundRates", "diagnose", "find_lr"]
