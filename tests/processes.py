"""Runs a function in several processes that know of each other, for at most so long: a hang is a failure."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = 120


# What gloo says, now and then on a busy machine, when the processes do not find each other; nothing has begun by then.
_NOT_MET = "connectFullMesh failed"
# Seen once in some 2,000 trainings: "malloc(): unaligned tcache chunk detected" during a collective of gloo. No code of
# ours is native, so this is not what the tests are about; it is tried again, and said.
_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)


def prepared():
    """Return a context whose processes fork from one that has already done the slow imports, which take seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["egop", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"])
    return context


def run(function, world, *arguments, timeout=TIMEOUT, attempts=3):
    """Return what ``function(rank, world, *arguments)`` returned in each process; reraise an error from any of them."""
    context = prepared()
    threads = torch.get_num_threads() if world == 1 else 1  # products of more threads are rounded in another way
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_main, args=(function, rank, world, folder, threads, arguments), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        errors = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
        crashed = any(process.exitcode in _CRASHES for process in processes)
        if crashed and attempts > 1:
            warnings.warn("A process crashed in native code; trying again.", stacklevel=2)
        if attempts > 1 and (crashed or (errors and all(_NOT_MET in error for error in errors))):
            return run(function, world, *arguments, timeout=timeout, attempts=attempts - 1)
        errors.sort(key=lambda error: "Connection closed" in error)  # what only follows from another's failure last
        assert not errors, f"{len(errors)} of {world} processes failed; the first one:\n{errors[0]}"
        assert all(process.exitcode == 0 for process in processes), "a process was killed"
        return [torch.load(Path(folder) / f"result-{rank}", weights_only=True) for rank in range(world)]


def _wait(processes, end):
    """Wait until all have ended, or one has failed and the others would wait for it."""
    while any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            time.sleep(0.5)  # so that others can say what happened to them
            return
        assert time.monotonic() < end, "the processes hang"
        time.sleep(0.02)


def _main(function, rank, world, folder, threads, arguments):
    torch.set_num_threads(threads)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
        result = function(rank, world, *arguments)
        torch.save(result, Path(folder) / f"result-{rank}")
        if dist.is_initialized():  # or the function has ended it
            dist.barrier()
    except BaseException:
        (Path(folder) / f"error-{rank}").write_text(traceback.format_exc())
        raise SystemExit(1) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
