"""What any test may ask for."""

import logging

import pytest
import torch

from egop.optimizer import inner

# That no basis helps these is said in the tests of that alone: everywhere else they are there to be compared with.
inner._WARNED |= {torch.optim.SGD, torch.optim.ASGD}


@pytest.fixture
def lines(caplog):
    """What egop has logged so far."""
    caplog.set_level(logging.DEBUG, logger="egop")
    return lambda: caplog.messages
