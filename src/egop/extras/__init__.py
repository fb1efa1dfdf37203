"""Optional tools: f(V x) as a module, rotated inputs, random rotations, and optimizers for trainers.

No other package of egop uses them.
"""

from egop.basis import RandomRotation
from egop.extras.frameworks import trainer_optimizer
from egop.extras.models import merge, parametrize, rotate_inputs

__all__ = [
    "RandomRotation",
    "merge",
    "parametrize",
    "rotate_inputs",
    "trainer_optimizer",
]
