"""Will it help here, what does it cost (``diagnose``: measured, said in words, raced, a page); and at which rate?

``scaling`` says what a basis costs from shapes alone. The stages of the command line are imported when they are run.
"""

from egop.diagnostics.answer import Diagnosis
from egop.diagnostics.learning_rates import find_lr
from egop.diagnostics.measure import diagnose
from egop.diagnostics.rate_search import FoundRate
from egop.diagnostics.values import BlockDiagnosis

__all__ = ["BlockDiagnosis", "Diagnosis", "FoundRate", "diagnose", "factories", "find_lr", "scaling", "stages"]
