"""Tools around a basis: f(V x) as a module, rotated inputs, random rotations, optimizers for trainers.

Nothing else in egop uses them.
"""

from egop.basis import RandomRotation
from egop.extras.frameworks import trainer_optimizer
from egop.extras.inputs import rotate_inputs
from egop.extras.parametrization import merge, parametrize

__all__ = [
    "RandomRotation",
    "merge",
    "parametrize",
    "rotate_inputs",
    "trainer_optimizer",
]
