"""Will it help here, and what does it cost? Measured and said in words (``diagnose``), raced, written as a page.

``scaling`` says what a basis costs from shapes alone. The stages of the command line are imported when they are run.
"""

from egop.diagnostics.measure import diagnose
from egop.diagnostics.values import BlockDiagnosis, Diagnosis

__all__ = ["BlockDiagnosis", "Diagnosis", "diagnose", "factories", "scaling", "stages"]
