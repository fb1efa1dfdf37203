"""What any test may ask for."""

import gc
import logging

import pytest


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
    """Return a function that returns what egop has logged so far."""
    caplog.set_level(logging.DEBUG, logger="egop")
    return lambda: caplog.messages
