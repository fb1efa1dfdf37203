"""Refreshes: re-estimate a basis at regular intervals, or keep it current from the training gradients.

To add a refresh, subclass ``Refresh``; its ``start`` creates a ``Refresher`` for each optimizer.
"""

from egop.optimizer import Rebasable, Refresh, Refresher
from egop.refresh.aligned import Aligned
from egop.refresh.every import Every
from egop.refresh.online import Online

__all__ = ["Aligned", "Every", "Online", "Rebasable", "Refresh", "Refresher"]
