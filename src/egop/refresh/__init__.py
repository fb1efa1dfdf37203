"""When and how a basis is renewed: from samples every so often, or from the training gradients as they come.

A new way is a subclass of ``Refresh``, which begins a ``Refresher`` for each optimizer.
"""

from egop.optimizer import Refresh, Refresher
from egop.refresh.aligned import Aligned
from egop.refresh.every import Every
from egop.refresh.online import Online, WhenDrifted

__all__ = ["Aligned", "Every", "Online", "Refresh", "Refresher", "WhenDrifted"]
