"""Run the example and kill it as ``KILLS`` says: one word for each start, "step:RANK:COUNT" or "write:RANK:COUNT".

The first kills a process after so many optimizer steps, the second at the given call of ``os.fsync``: torch makes one
for each file of a checkpoint.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_post_hook

import egop


def plan_death():
    kills = os.environ["KILLS"].split()
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if start >= len(kills):
        return
    kind, rank, count = kills[start].split(":")
    if rank != os.environ["RANK"]:
        return
    calls = itertools.count(1)

    def called(*_):
        if next(calls) == int(count):
            os.kill(os.getpid(), signal.SIGKILL)

    if kind == "step":
        register_optimizer_step_post_hook(
            lambda optimizer, *_: called() if isinstance(optimizer, egop.ReparameterizedOptimizer) else None
        )
    else:
        fsync = os.fsync
        os.fsync = lambda file: (called(), fsync(file))


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("example", sys.argv[1])
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    plan_death()
    example.main(sys.argv[2:])
