"""Signals as a terminal delivers them, however the tests themselves were started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib


def heed_ctrl_c():
    """Restore SIGINT (for ``preexec_fn``): background jobs and ``nohup`` ignore it, and so would their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# In the place of torch: says when its import begins, takes long, and loses what is raised in it, as extensions may.
_SLOW = """
import time
print("importing", flush=True)
try:
    time.sleep(60)
except BaseException:
    pass
"""


def interrupted_import(project, folder):
    """Return the exit status and stderr of a project's only console script after Ctrl-C while it imports torch.

    Args:
        project: the ``pyproject.toml`` that names what the script calls.
        folder: where the stand-in for torch is written.
    """
    (target,) = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["scripts"].values()
    module, _, function = target.partition(":")
    (folder / "torch.py").write_text(_SLOW)
    script = subprocess.Popen(
        [sys.executable, "-c", f"import sys; from {module} import {function}; sys.exit({function}())"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        preexec_fn=heed_ctrl_c,
    )
    with script:
        assert script.stdout.readline() == "importing\n"
        script.send_signal(signal.SIGINT)
        try:
            _, errors = script.communicate(timeout=30)
        finally:
            script.kill()
    return script.returncode, errors
