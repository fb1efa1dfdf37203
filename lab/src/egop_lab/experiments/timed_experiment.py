"""Names that the study of prediction imports from here."""

from egop_lab.training.tuning import is_tuning, search_rates

__all__ = ["is_tuning", "search_rates"]
