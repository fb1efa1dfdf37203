"""What to use for a given model, what it costs (``diagnose``), and at which learning rate (``find_lr``).

The modules behind the command line, ``stages`` and ``factories``, are imported when a command runs.
"""

from egop.diagnostics.answer import Diagnosis
from egop.diagnostics.learning_rates import find_lr
from egop.diagnostics.measure import diagnose
from egop.diagnostics.rate_search import FoundRate
from egop.diagnostics.values import BlockDiagnosis

__all__ = ["BlockDiagnosis", "Diagnosis", "FoundRate", "diagnose", "factories", "find_lr", "stages"]
