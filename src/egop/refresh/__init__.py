"""Refreshes: estimate a basis again every so often, or keep it current from the training gradients.

A refresh of your own is a subclass of ``Refresh``, whose ``start`` creates a ``Refresher`` for each optimizer.
"""

from egop.optimizer import Rebasable, Refresh, Refresher
from egop.refresh.aligned import Aligned
from egop.refresh.every import Every
from egop.refresh.online import Online

__all__ = ["Aligned", "Every", "Online", "Rebasable", "Refresh", "Refresher"]
