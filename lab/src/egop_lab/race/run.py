"""Make the runs that the rules ask for: ``python -m egop_lab.race.run --help``.

Worker processes share one device and keep model, data and CUDA graphs from run to run. This process decides what runs
next and is the only one that writes: each finished run is appended to the output file at once, so that a race that is
stopped loses only the runs in progress. No time in these records is fit to quote, since runs share the device.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from egop_lab.files import replace_nonfinite
from egop_lab.race.results import describe, load_records
from egop_lab.race.tasks import RIVALS, TASKS, Run, Task
from egop_lab.race.tune import plan, read_losses

_MOST_FAILURES = 5
_STEP_SECONDS = 0.03  # of a task that has no records yet
_START_SECONDS = 45  # imports, data, CUDA graphs and the compilation of kernels, once per worker


def work(connection: Connection, folder: str | None, device_name: str, info: Mapping[str, Any]) -> None:
    """Do the runs that arrive over a connection, until it closes or a run fails."""
    import torch

    from egop_lab.race.problems import make_problem
    from egop_lab.race.train import configure_torch, train

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 8))
    device = torch.device(device_name)
    configure_torch(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    info = {**info, "torch": torch.__version__, "device": name}
    current, problem = None, None
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            run = connection.recv()
            try:
                if run.task != current:
                    problem = None  # free the last one before the next is made
                    current, problem = run.task, make_problem(TASKS[run.task], folder, device)
                assert problem is not None
                results = train(problem, TASKS[run.task], run)
            except Exception:
                connection.send(traceback.format_exc())
                return
            connection.send({**dataclasses.asdict(run), "lr": run.lr, **results, **info})


class Worker:
    """A process that does runs, and its current run."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, *arguments), daemon=True)
        self.process.start()
        other.close()
        self.run: Run | None = None
        self.is_new = True

    def send(self, run: Run) -> None:
        """Give the worker a run."""
        self.connection.send(run)
        self.run = run

    def receive(self) -> tuple[Run, dict[str, Any] | str]:
        """Return the run that has ended and its record, or a message if it failed."""
        assert self.run is not None
        run, self.run, self.is_new = self.run, None, False
        try:
            return run, self.connection.recv()
        except (EOFError, ConnectionResetError):
            return run, "the worker process died"

    def stop(self) -> None:
        """End the process and any run in progress."""
        self.connection.close()  # which ends an idle one
        self.process.join(10 if self.run is None and not self.is_new else 0)
        self.process.kill()
        self.process.join()


class Race:
    """A scheduler that decides which runs to do, hands them to workers, and writes their records.

    Args:
        races: tasks with the methods that race on them, in order; a task may come again with more methods.
        paths: files with earlier records.
        out: file to which new records are appended.
        workers: how many processes share the device.
        budget: seconds after which everything has ended.
        settings: what a worker is started with.
    """

    def __init__(
        self,
        *,
        races: Sequence[tuple[Task, Sequence[str]]],
        paths: Sequence[Path],
        out: Path,
        workers: int,
        budget: float,
        settings: tuple[Any, ...],
    ) -> None:
        self.started = time.monotonic()
        self.races, self.out, self.budget, self.settings = races, out, budget, settings
        self.records = load_records(*paths, out)
        self.losses = read_losses(self.records.values())
        self.failed: dict[Run, str] = {}
        # Each worker is the slower, the more there are.
        self.step_seconds = {
            (run.task, run.method): record["seconds"] / run.steps * workers / record["workers"]
            for run, record in self.records.items()
        }
        self.made = 0
        self.workers = [Worker(*settings) for _ in range(workers)]

    @property
    def left(self) -> float:
        """Seconds left of the budget."""
        return self.started + self.budget - time.monotonic()

    def go(self) -> bool:
        """Race until there is nothing left to run or no time to run it; return True if no run failed."""
        try:
            while self._hand_out() and self.left > 0:
                busy = {worker.connection: worker for worker in self.workers if worker.run is not None}
                for connection in wait(list(busy), timeout=min(60.0, max(0.0, self.left))):
                    self._take_back(busy[connection])  # type: ignore[index]  # they are connections
            for worker in self.workers:
                if worker.run is not None:
                    self._say(f"stopped at the end of the budget: {format_run(worker.run)}")
        finally:
            for worker in self.workers:
                worker.connection.close()  # idle workers end together
            for worker in self.workers:
                worker.stop()
        return not self.failed

    def _hand_out(self) -> bool:
        """Give idle workers something to do; return False if no worker has anything to do."""
        busy = {worker.run for worker in self.workers} - {None}
        if len(self.failed) < _MOST_FAILURES:
            idle = [worker for worker in self.workers if worker.run is None]
            waiting = [run for run in self.queue() if run not in busy and run not in self.failed] if idle else []
            for worker in idle:
                fits = (run for run in waiting if self.estimate(run, worker) < self.left)
                if (run := next(fits, None)) is not None:
                    worker.send(run)
                    waiting.remove(run)
                    busy.add(run)
        return bool(busy)

    def queue(self) -> list[Run]:
        """Return the runs that the rules ask for now, race by race."""
        return list(dict.fromkeys(run for task, methods in self.races for run in plan(task, methods, self.losses)))

    def estimate(self, run: Run, worker: Worker) -> float:
        """Estimate the seconds that a run takes, generously."""
        known = self.step_seconds.get((run.task, run.method)) or max(
            (seconds for (task, _), seconds in self.step_seconds.items() if task == run.task), default=0.0
        )
        step = known or _STEP_SECONDS * len(self.workers)
        return 1.3 * step * run.steps + 1 + (_START_SECONDS if worker.is_new and self.budget < math.inf else 0)

    def _take_back(self, worker: Worker) -> None:
        run, record = worker.receive()
        if isinstance(record, str):
            self.failed[run] = record
            self._say(f"FAILED: {format_run(run)}\n{record}")
            worker.stop()
            self.workers[self.workers.index(worker)] = Worker(*self.settings)
            return
        append_record(self.out, record)
        self.records[run] = record
        self.losses |= read_losses([record])
        self.made += 1
        self.step_seconds[run.task, run.method] = record["seconds"] / run.steps
        loss = "diverged" if record["diverged"] else f"val {record['validation']:.4f}"
        test = "" if record["test"] is None else f", test {record['test']:.4f}"
        self._say(f"{format_run(run)}: {loss}{test}, {record['seconds']:.1f} s")

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s, {self.made} done] {text}", flush=True)


def format_run(run: Run) -> str:
    """Return a run on one line."""
    clip = "none" if run.clip is None else f"{run.clip:g}"
    return (
        f"{run.task} {run.method} lr {run.lr:.2e} beta {run.beta:g} warm-up {run.warmup} clip {clip} "
        f"steps {run.steps} seed {run.seed}"
    )


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record and wait until it is on disk."""
    content = path.read_bytes()[-1:] if path.exists() else b""
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if content in (b"", b"\n") else "\n") + json.dumps(replace_nonfinite(record)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def describe_code() -> dict[str, str]:
    """Return a hash of the source files that decide what a run computes and, in a clean git checkout, the commit."""
    lab = Path(__file__).parents[1]
    root = lab.parents[2]
    places = [root / "src" / "egop", lab / "race", lab / "models", lab / "data", lab / "gpu.py", lab / "muon.py"]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    found = {"source": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]}
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not commit.endswith("-dirty"):
            found["commit"] = commit
    return found


@contextlib.contextmanager
def share_gpu(wanted: bool) -> Iterator[None]:
    """Let processes use the GPU at the same time by CUDA MPS, if it is wanted and works here."""
    if not wanted:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        os.environ.update(dict.fromkeys(names, folder))
        control = "nvidia-cuda-mps-control"
        works = _succeeds([control, "-d"]) and _succeeds(
            [sys.executable, "-c", "import torch; torch.ones(8, device='cuda').sum().item()"]
        )
        print(f"CUDA MPS {'is on' if works else 'does not work here: workers take turns'}", flush=True)
        if not works:
            _succeeds([control], "quit\n")
            for name in names:
                del os.environ[name]
        try:
            yield
        finally:
            if works:
                _succeeds([control], "quit\n")


def _succeeds(command: Sequence[str], text: str = "") -> bool:
    try:
        null = subprocess.DEVNULL  # a daemon would keep ours open
        return subprocess.run(command, input=text, text=True, timeout=60, stdout=null, stderr=null).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def read_race(name: str, *methods: str) -> tuple[Task, list[str]]:
    """Return a task and the methods that race on it, by default the rivals."""
    if name not in TASKS:
        raise ValueError(f"Invalid task: {name!r}. Must be one of {', '.join(TASKS)}.")
    task = TASKS[name]
    if unknown := [method for method in methods if method not in task.guesses]:
        raise ValueError(f"Invalid method for {name}: {unknown[0]!r}. Must be one of {'; '.join(task.guesses)}.")
    return task, list(methods) or [method for method in RIVALS if method in task.guesses]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Make the runs of the race that are still missing.")
    parser.add_argument(
        "--race",
        dest="races",
        nargs="+",
        action="append",
        required=True,
        metavar=("TASK", "METHOD"),
        help=f"a task and its methods, by default {', '.join(RIVALS)}; may be given several times",
    )
    parser.add_argument("--data", help="folder with the data")
    parser.add_argument("--records", nargs="*", type=Path, default=[], help="files with earlier records")
    parser.add_argument("--out", type=Path, help="file to which new records are appended")
    parser.add_argument("--workers", type=int, default=3, help="processes that share the device (default: 3)")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which everything has ended")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--mps", action="store_true", help="try CUDA MPS")
    parser.add_argument("--show", action="store_true", help="print the results so far and run nothing")
    options = parser.parse_args(arguments)
    if not options.show and options.out is None:
        parser.error("--out is needed, unless --show is given")
    try:
        races = [read_race(*words) for words in options.races]
    except ValueError as error:
        parser.error(str(error))
    records = [*options.records, *([options.out] if options.out else [])]
    good = True
    if not options.show:
        os.environ["TQDM_DISABLE"] = "1"  # workers print nothing of their own
        began = time.monotonic()
        info = {**describe_code(), "workers": options.workers}
        for task, _ in races:
            if task.data == "code":
                from egop_lab.race.data import prepare_tokens

                prepare_tokens(options.data, task.model["vocabulary"])  # once, not in every worker
        with share_gpu(options.mps):
            race = Race(
                races=races,
                paths=options.records,
                out=options.out,
                workers=options.workers,
                budget=options.budget - (time.monotonic() - began),
                settings=(options.data, options.device, info),
            )
            good = race.go()
        print(f"{race.made} runs made, {len(race.failed)} failed, {len(race.queue())} wanted next", flush=True)
    found = load_records(*records)
    for task, methods in races:
        print("\n".join(describe(task, methods, found)), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
