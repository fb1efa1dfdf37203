"""EGOP: the recommended optimizer, as one class that takes the place of AdamW.

``egop.optim`` steps the matrices, torch's AdamW everything else. The algorithm on one page is ``reference.py``.
"""

from egop.recipes.egop import EGOP

__all__ = ["EGOP"]
