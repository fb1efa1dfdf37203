"""What any test may ask for."""

import gc
import logging

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Exempt the collected tests and their imports, which live until the end, from garbage collection."""
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
