"""The optimizer: torch's interface, the engine behind it, and the base classes of refreshes.

``reparameterized`` is torch's interface, ``engine`` takes a step, ``state`` exports and restores.
"""

from egop.optimizer.binding import BoundBlock
from egop.optimizer.checks import find_user_level
from egop.optimizer.groups import name_groups, named_parameters
from egop.optimizer.moments import Moments, check_moments
from egop.optimizer.refreshing import Rebasable, Refresh, Refresher
from egop.optimizer.reparameterized import ReparameterizedOptimizer
from egop.optimizer.stacks import Stack

__all__ = [
    "BoundBlock",
    "Moments",
    "Rebasable",
    "Refresh",
    "Refresher",
    "ReparameterizedOptimizer",
    "Stack",
    "check_moments",
    "find_user_level",
    "name_groups",
    "named_parameters",
]
