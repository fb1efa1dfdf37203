"""The optimizer: torch's interface in front, the working parts behind it, and what a refresh is given.

``reparameterized`` is the door, ``engine`` the step, ``states`` and ``restoring`` the way out and back.
"""

from egop.optimizer.binding import BoundBlock
from egop.optimizer.loaded import level_of_user
from egop.optimizer.moments import Moments, check_moments
from egop.optimizer.refreshing import Rebasable, Refresh, Refresher
from egop.optimizer.reparameterized import ReparameterizedOptimizer
from egop.optimizer.stacks import Stack, Stacks

__all__ = [
    "BoundBlock",
    "Moments",
    "Rebasable",
    "Refresh",
    "Refresher",
    "ReparameterizedOptimizer",
    "Stack",
    "Stacks",
    "check_moments",
    "level_of_user",
]
