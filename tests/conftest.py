"""What any test may ask for."""

import gc
import logging

import pytest
import torch

from egop.optimizer import checks

# That no basis helps these is said in the tests of that alone: everywhere else they are there to be compared with.
checks._warned |= {torch.optim.SGD, torch.optim.ASGD}


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Thousands of tests and all that they import stay to the end: no search for garbage needs to go through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def lines(caplog):
    """What egop has logged so far."""
    caplog.set_level(logging.DEBUG, logger="egop")
    return lambda: caplog.messages
