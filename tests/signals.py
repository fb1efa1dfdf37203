"""Signals as a terminal delivers them, however the tests themselves were started."""

from __future__ import annotations

import signal


def heed_ctrl_c():
    """For ``preexec_fn``: a job in the background, or under ``nohup``, ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
