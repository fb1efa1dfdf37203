"""Tools around a basis besides the optimizer: the literal f∘V, rotated inputs, factories for trainers.

Nothing else in egop uses these.
"""

from egop.extras.frameworks import trainer_optimizer
from egop.extras.inputs import rotate_inputs
from egop.extras.parametrization import merge, parametrize

__all__ = [
    "merge",
    "parametrize",
    "rotate_inputs",
    "trainer_optimizer",
]
