"""The optimizer: torch's interface, the engine behind it, and the base classes of refreshes.

``reparameterized`` is torch's interface, ``engine`` takes a step, ``state`` exports and restores.
"""

from egop.optimizer.binding import BoundBlock
from egop.optimizer.binding import BoundParameters as BoundParameters
from egop.optimizer.binding import check_separate_memory as check_separate_memory
from egop.optimizer.checks import find_user_level
from egop.optimizer.checks import warn_of_replaced as warn_of_replaced
from egop.optimizer.display import format_groups as format_groups
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
