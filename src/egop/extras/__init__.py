"""What goes with a basis beside the optimizer: the literal f∘V, rotated inputs, Adagrad on a ball, trainers.

Nothing else in egop uses these.
"""

from egop.extras.constrained import BallConstrainedAdagrad
from egop.extras.frameworks import trainer_optimizer
from egop.extras.inputs import rotate_inputs
from egop.extras.parametrization import merge, parametrize

__all__ = [
    "BallConstrainedAdagrad",
    "merge",
    "parametrize",
    "rotate_inputs",
    "trainer_optimizer",
]
