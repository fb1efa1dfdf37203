"""Will it help here? What a basis costs on a model, what its spectra say, and what to do about it."""

from egop.diagnostics.measure import diagnose
from egop.diagnostics.values import BlockDiagnosis, Diagnosis

__all__ = ["BlockDiagnosis", "Diagnosis", "diagnose"]
