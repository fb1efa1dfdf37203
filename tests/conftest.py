"""What any test may ask for."""

import logging

import pytest


@pytest.fixture
def lines(caplog):
    """What egop has logged so far."""
    caplog.set_level(logging.DEBUG, logger="egop")
    return lambda: caplog.messages
