from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from signals import heed_ctrl_c


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize(("prepare", "heeded"), [(None, "False"), (heed_ctrl_c, "True")])
def test_a_child_heeds_ctrl_c_though_the_tests_were_started_with_it_ignored(prepare, heeded):
    script = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    own = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        shown = subprocess.check_output([sys.executable, "-c", script], preexec_fn=prepare, text=True, timeout=60)
    finally:
        signal.signal(signal.SIGINT, own)
    assert shown.strip() == heeded
